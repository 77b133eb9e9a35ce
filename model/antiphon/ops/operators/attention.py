"""Attention of packed tokens, over their own sequence or over cached blocks, and the reads and writes of the blocks.

The layout of the pool of blocks is that of cache_geometry.py (Kwon et al. 2023, section 4). Sublayers compute attention
by the plain functions; what graphs have as nodes of their own are the operators.

Axes: N packed tokens, B sequences or sources, R rows, X width of a block table, H heads of a layer, C heads of the
pool, D head width, T tokens or positions of one sequence, P positions, or rows of the tables of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from antiphon.ops.attention import attention
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.disentangled import position_scores
from antiphon.ops.operator import Input, Operator, Output, register
from antiphon.ops.shared_inputs import BLOCK_TABLES, CACHE, LAYER, NUM_HEADS, QKV, SCALE, SOURCE_OFFSETS


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
    cap: float = 0.0,
) -> Tensor:
    """Attend from every token of qkv [N, 3 H D] to its own sequence, sequence by sequence."""
    attended = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for start, stop in token_ranges(offsets):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        bias = score_bias(torch.arange(stop - start), stop - start, bias_table, slopes)
        result = attention(query[None], key[None], value[None], None, bias, causal=causal, scale=scale, cap=cap)
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
    cap: float = 0.0,
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
            attended[start + token] = _attend_one(query[token], *cached, bias, scale, cap)
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
    cap: float = 0.0,
) -> Tensor:
    """Attend from the new tokens of each row to its source, row by row."""
    attended, queries = torch.zeros_like(query), split_heads(query, 1, num_heads)[0]
    rows = zip(block_tables.tolist(), source_lens.tolist(), token_ranges(offsets), strict=True)
    for table, length, (start, stop) in rows:
        cached = read_positions(cache, layer, table, length, (num_heads, queries.shape[2]))
        for token in range(start, stop):
            attended[token] = _attend_one(queries[token], *cached, None, scale, cap)
    return attended


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, cap: float) -> Tensor:
    """Attend from one query [H, D] to keys and values [T, H, D]; returns [H D]."""
    attended = attention(query[None, None], keys[None], values[None], None, bias, causal=False, scale=scale, cap=cap)
    return attended.flatten()


def score_bias(query_positions: Tensor, keys: int, bias_table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Return the bias of scores of queries at these positions [T] and keys at 0 to keys - 1; [1, H, T, keys] or None.

    bias_table [H, 2 * reach + 1] and slopes [H] are the inputs of these names.
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


def write_position(cache: Tensor, layer: int, table: Sequence[int], position: int, key: Tensor, value: Tensor) -> None:
    """Store one position's key and value, each [H, D], in the cache, rounded to its type."""
    block, lane, (heads, width) = table[position // BLOCK_SIZE], position % BLOCK_SIZE, key.shape
    keys, values = _views(cache[block, layer])
    keys[:heads, :width, lane] = key.to(cache.dtype)
    values[:heads, lane, :width] = value.to(cache.dtype)


def read_positions(
    cache: Tensor, layer: int, table: Sequence[int], length: int, heads: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions 0 to length - 1, each [T, H, D] float32; read nothing else.

    heads: H and D; H can be less than the pool has.
    """
    count, width = heads
    parts = [_views(cache[table[block], layer]) for block in range(blocks_for(length))]
    keys = torch.cat([keys[:count, :width].permute(2, 0, 1) for keys, _ in parts])  # [16 * blocks, H, D]
    values = torch.cat([values[:count, :, :width].transpose(0, 1) for _, values in parts])
    return keys[:length].float(), values[:length].float()


def _views(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of one layer of a block [2, C, 16 * Dp]: keys [C, Dp, 16] and values [C, 16, Dp]."""
    heads = block.shape[1]
    return block[0].view(heads, -1, BLOCK_SIZE), block[1].view(heads, BLOCK_SIZE, -1)


DISENTANGLED_ATTENTION = Operator(
    name="disentangled_attention",
    purpose=(
        "Attention of each packed sequence over itself, without padding, with scores of relative positions (He et al."
        " 2021, section 3.1)."
    ),
    inputs=(
        QKV,
        SOURCE_OFFSETS,
        Input(
            "position_rows",
            "int32",
            "2 * reach + 1",
            "row of the tables by distance query - key, never falling; the outermost entries cover larger distances",
        ),
        Input("position_keys", "float", "P, H D", "keys of relative positions", optional=True),
        Input("position_queries", "float", "P, H D", "queries of relative positions", optional=True),
    ),
    attributes=(NUM_HEADS, SCALE),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
    shapes=lambda inputs: [(inputs["qkv"].shape[0], inputs["qkv"].shape[1] // 3)],
)


@register(DISENTANGLED_ATTENTION)
def disentangled_attention(
    qkv: Tensor,
    offsets: Tensor,
    position_rows: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attend sequence by sequence; `disentangled.py` defines the scores."""
    attended = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    reach = len(position_rows) // 2
    for start, stop in token_ranges(offsets):
        query, key, value = (part[None] for part in split_heads(qkv[start:stop], 3, num_heads))  # [1, T, H, D]
        positions = torch.arange(stop - start)
        rows = position_rows[(positions[:, None] - positions).clamp(-reach, reach) + reach].long()
        bias = position_scores(query, key, position_keys, position_queries, rows) * scale
        attended[start:stop] = attention(query, key, value, None, bias, causal=False, scale=scale)[0].flatten(1)
    return attended


PAGED_WRITE = Operator(
    name="paged_write",
    purpose="Store the keys and values of packed sources in their cross blocks, from position 0.",
    inputs=(
        Input("kv", "float", "N, 2 H D", "keys and values of each token"),
        CACHE,
        replace(BLOCK_TABLES, axes="B, X", meaning="blocks of each source, in the order of its positions"),
        SOURCE_OFFSETS,
        Input(
            "after", "int32", "1", "output of another write, which must run first; the value is not read", optional=True
        ),
    ),
    attributes=(NUM_HEADS, LAYER),
    outputs=(
        Output("written", "int32", "1", "N"),
        Output("present", "cache", CACHE.axes, "the cache with the sources", updates="cache"),
    ),
    shapes=lambda inputs: [(1,), inputs["cache"].shape],
)


@register(PAGED_WRITE)
def paged_write(
    kv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    after: Tensor | None,
    *,
    num_heads: int,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Write position by position, in a copy of the cache."""
    cache = cache.clone()
    for table, (start, stop) in zip(block_tables.tolist(), token_ranges(offsets), strict=True):
        keys, values = split_heads(kv[start:stop], 2, num_heads)  # [T, H, D]
        for position in range(stop - start):
            write_position(cache, layer, table, position, keys[position], values[position])
    return torch.tensor([kv.shape[0]], dtype=torch.int32), cache
