"""Attention over the blocks of the cache pool (Kwon et al. 2023, section 4): of rows over their targets and sources.

The layout of the pool is that of cache_geometry.py.

Axes: N packed tokens, R rows, X and Y widths of block tables, H heads, D head width, T positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.ops.attention import attention
from antiphon.ops.cache_pool import read_positions, write_position
from antiphon.ops.operator import Input, Operator, Output
from antiphon.ops.operators.attention_inputs import (
    BIAS_TABLE,
    BLOCK_TABLES,
    CACHE,
    LAYER,
    NUM_HEADS,
    QKV,
    ROW_OFFSETS,
    SCALE,
    SLOPES,
    score_bias,
    split_heads,
    token_ranges,
)
from antiphon.ops.torch_registration import register

PAGED_SELF_ATTENTION = Operator(
    name="paged_self_attention",
    purpose=(
        "Append each row's new tokens to its blocks, then attend from each new token to all positions up to its own."
    ),
    inputs=(
        replace(QKV, meaning="queries, keys and values of each new token"),
        CACHE,
        BLOCK_TABLES,
        ROW_OFFSETS,
        Input("positions", "int32", "N", "position of each new token in its row"),
        BIAS_TABLE,
        SLOPES,
    ),
    attributes=(NUM_HEADS, SCALE, LAYER),
    outputs=(
        Output("out", "float", "N, H D", "weighted sums of values"),
        Output("present", "cache", CACHE.axes, "the cache with the new tokens", updates="cache"),
    ),
    shapes=lambda given: [(given["qkv"].shape[0], given["qkv"].shape[1] // 3), given["cache"].shape],
)

PAGED_CROSS_ATTENTION = Operator(
    name="paged_cross_attention",
    purpose="Attend from each row's new tokens to its source; its cross blocks hold the source's keys and values.",
    inputs=(
        Input("query", "float", "N, H D", "queries of each new token"),
        CACHE,
        replace(BLOCK_TABLES, axes="R, Y", meaning="blocks of each row's source, in the order of its positions"),
        ROW_OFFSETS,
        Input("source_lens", "int32", "R", "tokens of each row's source"),
    ),
    attributes=(NUM_HEADS, SCALE, LAYER),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
    shapes=lambda given: [given["query"].shape],
)


@register(PAGED_SELF_ATTENTION)
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
    """Append and attend row by row, in a copy of the cache."""
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


@register(PAGED_CROSS_ATTENTION)
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
    """Attend row by row."""
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
