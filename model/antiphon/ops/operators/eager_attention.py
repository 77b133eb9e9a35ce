"""Attention of packed tokens in PyTorch, as the sublayers compute it: over their own sequence, or over cached blocks.

The layout of the pool of blocks is that of cache_geometry.py (Kwon et al. 2023, section 4).

Axes: N packed tokens, B sequences, R rows, H heads, D head width, T tokens or positions of one sequence, P positions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from antiphon.ops.attention import attention
from antiphon.ops.cache_pool import read_positions, write_position


def rotary(qkv: Tensor, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    """Rotate queries and keys of qkv [N, 3 H D] at positions [N] by table [P, D] (Su et al. 2021, section 3.4).

    Component i of a head is paired with component i + D / 2.
    """
    parts = qkv.reshape(qkv.shape[0], 3, num_heads, table.shape[1])  # [N, 3, H, D]
    cos, sin = table[positions.long()][:, None, None].chunk(2, dim=-1)  # [N, 1, 1, D / 2]
    first, second = parts[:, :2].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, parts[:, 2:]), dim=1).flatten(1)


def packed_attention(
    qkv: Tensor,
    offsets: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend from every token of qkv [N, 3 H D] to its own sequence, sequence by sequence."""
    attended = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for start, stop in token_ranges(offsets):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        bias = score_bias(torch.arange(stop - start), stop - start, bias_table, slopes)
        result = attention(query[None], key[None], value[None], None, bias, causal=causal, scale=scale)
        attended[start:stop] = result[0].flatten(1)
    return attended


def paged_self_attention(
    qkv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Append each row's new tokens to its blocks, in a copy of the cache, and attend to all positions up to theirs."""
    cache, attended = cache.clone(), qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for table, (start, stop) in zip(block_tables.tolist(), token_ranges(offsets), strict=True):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        row_positions = positions[start:stop].tolist()
        for token, position in enumerate(row_positions):
            write_position(cache, layer, table, position, key[token], value[token])
        for token, position in enumerate(row_positions):
            cached = read_positions(cache, layer, table, position + 1, (num_heads, query.shape[2]))
            bias = score_bias(torch.tensor([position]), position + 1, bias_table, slopes)
            attended[start + token] = _attend_one(query[token], *cached, bias, scale)
    return attended, cache


def paged_cross_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    source_lens: Tensor,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> Tensor:
    """Attend from the new tokens of each row to its source, row by row."""
    attended, queries = torch.zeros_like(query), split_heads(query, 1, num_heads)[0]
    rows = zip(block_tables.tolist(), source_lens.tolist(), token_ranges(offsets), strict=True)
    for table, length, (start, stop) in rows:
        cached = read_positions(cache, layer, table, length, (num_heads, queries.shape[2]))
        for token in range(start, stop):
            attended[token] = _attend_one(queries[token], *cached, None, scale)
    return attended


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attend from one query [H, D] to keys and values [T, H, D]; returns [H D]."""
    return attention(query[None, None], keys[None], values[None], None, bias, causal=False, scale=scale).flatten()


def score_bias(query_positions: Tensor, keys: int, bias_table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Return the bias of scores of queries at these positions [T] and keys at 0 to keys - 1; [1, H, T, keys] or None.

    bias_table [H, 2 * reach + 1] and slopes [H] are the inputs declared above.
    """
    if bias_table is None and slopes is None:
        return None
    distance = torch.arange(keys) - query_positions.long()[:, None]  # [T, keys]
    bias = torch.zeros(1, 1, *distance.shape)
    if bias_table is not None:
        reach = bias_table.shape[1] // 2
        bias = bias + bias_table[:, distance.clamp(-reach, reach) + reach]
    if slopes is not None:
        bias = bias - slopes[:, None, None] * distance.abs()
    return bias


def split_heads(packed: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """Split [T, parts * H * D] into its parts, each [T, H, D]."""
    width = packed.shape[1] // (parts * num_heads)
    return packed.reshape(packed.shape[0], parts, num_heads, width).unbind(1)


def token_ranges(offsets: Tensor) -> list[tuple[int, int]]:
    """Return the first token and the end of every sequence or row."""
    return list(pairwise(offsets.tolist()))
