"""Attention of packed sequences over themselves, without a matrix of scores (Dao et al. 2022, algorithm 1)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_attention(
    out,  # [N, H D]
    qkv,  # [N, 3 H D]
    bias,  # [3 H D]
    offsets,  # [B + 1]
    tiles,  # [W, 2]
    bias_table,  # [H, 2 * reach + 1]
    slopes,  # [H]
    num_heads,
    width,  # D
    reach,
    scale,
    flags,  # 1: bias, 2: bias_table, 4: slopes, 8: causal
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least D
):
    """Compute one tile of queries of one head. Grid: W, H.

    The keys are read in an order that depends on the sequence alone, so a sequence's result does too.
    """
    sequence = tl.load(tiles + tl.program_id(0) * 2)
    if sequence < 0:
        return
    head = tl.program_id(1)
    begin = tl.load(offsets + sequence)
    length = tl.load(offsets + sequence + 1) - begin
    queries = tl.load(tiles + tl.program_id(0) * 2 + 1) + tl.arange(0, QUERIES)
    columns = tl.arange(0, WIDTH)
    is_column = columns < width
    stride = 3 * num_heads * width
    states = num_heads * width
    tokens = (begin + queries).to(tl.int64)
    is_query = (queries < length)[:, None] & is_column[None, :]
    query = tl.load(qkv + tokens[:, None] * stride + head * width + columns[None, :], is_query, other=0.0)
    if (flags & 1) != 0:
        query_bias = tl.load(bias + head * width + columns, is_column, other=0.0)
        query = (query.to(tl.float32) + query_bias.to(tl.float32)[None, :]).to(query.dtype)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    end = length
    if (flags & 8) != 0:
        end = tl.minimum(length, tl.load(tiles + tl.program_id(0) * 2 + 1) + QUERIES)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = (keys < length)[:, None] & is_column[None, :]
        sources = (begin + keys).to(tl.int64)[:, None] * stride + head * width + columns[None, :]
        key = tl.load(qkv + sources + states, is_key, other=0.0)
        value = tl.load(qkv + sources + 2 * states, is_key, other=0.0)
        if (flags & 1) != 0:
            key_bias = tl.load(bias + states + head * width + columns, is_column, other=0.0)
            value_bias = tl.load(bias + 2 * states + head * width + columns, is_column, other=0.0)
            key = (key.to(tl.float32) + key_bias.to(tl.float32)[None, :]).to(key.dtype)
            value = (value.to(tl.float32) + value_bias.to(tl.float32)[None, :]).to(value.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale
        distance = keys[None, :] - queries[:, None]
        if (flags & 2) != 0:
            entry = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias_table + head * (2 * reach + 1) + entry)
        if (flags & 4) != 0:
            scores -= tl.load(slopes + head) * tl.abs(distance).to(tl.float32)
        seen = (keys[None, :] < length) & ((distance <= 0) | ((flags & 8) == 0))
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        # A query of the padding can see no key in a tile: its largest score stays -inf, and exp of it must not be NaN.
        base = tl.where(larger > float("-inf"), larger, 0.0)
        weights = tl.exp(scores - base[:, None])
        correction = tl.exp(largest - base)
        total = total * correction + tl.sum(weights, 1)
        sums = sums * correction[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="tf32x3")
        largest = larger
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    places = tokens[:, None] * states + head * width + columns[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), is_query)
