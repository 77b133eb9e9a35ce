"""Kernels of attention: packed sequences over themselves, writes to cache blocks, tokens over cache blocks.

Packed attention has no matrix of scores (Dao et al. 2022, algorithm 1). Attention over cache blocks: Kwon et al. 2023,
section 4.1.
"""

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


@triton.jit
def paged_write(
    written,  # [1]
    cache,  # [num_blocks, L, 2, H, 16, D]
    kv,  # [N, parts H D]
    bias,  # [parts H D]
    tables,  # [R, X]
    rows,  # [N]
    positions,  # [N]
    parts,  # 2: keys and values; 3: queries before them, which are not read
    table_width,  # X
    num_heads,
    width,  # D
    num_layers,
    layer,
    flags,  # 1: bias
    BLOCK: tl.constexpr,  # at least D
):
    """Write one token's key and value of one head; a token of position -1 writes nothing. Grid: N, H."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if (token == 0) & (head == 0):
        tl.store(written, 1)
    position = tl.load(positions + token)
    if position < 0:
        return
    row = tl.load(rows + token)
    block = tl.load(tables + row * table_width + position // 16).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    states = num_heads * width
    source = (parts - 2) * states + head * width + columns
    key = tl.load(kv + token * parts * states + source, mask, other=0.0)
    value = tl.load(kv + token * parts * states + states + source, mask, other=0.0)
    if (flags & 1) != 0:
        key_bias = tl.load(bias + source, mask, other=0.0)
        value_bias = tl.load(bias + states + source, mask, other=0.0)
        key = (key.to(tl.float32) + key_bias.to(tl.float32)).to(key.dtype)
        value = (value.to(tl.float32) + value_bias.to(tl.float32)).to(value.dtype)
    place = ((block * num_layers + layer) * 2 * num_heads + head) * 16 * width + (position % 16) * width + columns
    tl.store(cache + place, key, mask)
    tl.store(cache + place + num_heads * 16 * width, value, mask)


@triton.jit
def paged_attention(
    out,  # [N, H D]
    sums,  # [N, H, S, D + 2]
    query,  # [N, query_stride]
    bias,  # [at least H D]
    cache,  # [num_blocks, L, 2, H, 16, D]
    tables,  # [R, X]
    rows,  # [N]
    lengths,  # [N]
    bias_table,  # [H, 2 * reach + 1]
    slopes,  # [H]
    table_width,  # X
    query_stride,
    num_heads,
    width,  # D
    num_layers,
    layer,
    reach,
    num_splits,
    scale,
    flags,  # 1: bias, 2: bias_table, 4: slopes
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two, at least D
):
    """Compute one token's result of one head, or its part over one split of the positions. Grid: N, H, S.

    The token is at position length - 1, which matters to the bias only.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + token)
    columns = tl.arange(0, WIDTH)
    is_column = columns < width
    states = num_heads * width
    vector = tl.load(query + token * query_stride + head * width + columns, is_column, other=0.0).to(tl.float32)
    if (flags & 1) != 0:
        vector += tl.load(bias + head * width + columns, is_column, other=0.0).to(tl.float32)
        vector = vector.to(query.dtype.element_ty).to(tl.float32)  # rounded as if the product had added the bias
    table = tables + tl.load(rows + token) * table_width
    share = tl.cdiv(tl.cdiv(length, KEYS), num_splits) * KEYS
    largest = float("-inf")
    total = 0.0
    result = tl.zeros([WIDTH], tl.float32)
    for start in range(split * share, tl.minimum(length, (split + 1) * share), KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < length
        block = tl.load(table + keys // 16, is_key, other=0).to(tl.int64)
        place = ((block * num_layers + layer) * 2 * num_heads + head) * 16 * width + (keys % 16) * width
        mask = is_key[:, None] & is_column[None, :]
        key = tl.load(cache + place[:, None] + columns[None, :], mask, other=0.0).to(tl.float32)
        scores = tl.sum(key * vector[None, :], 1) * scale
        distance = keys - (length - 1)
        if (flags & 2) != 0:
            entry = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias_table + head * (2 * reach + 1) + entry)
        if (flags & 4) != 0:
            scores -= tl.load(slopes + head) * tl.abs(distance).to(tl.float32)
        scores = tl.where(is_key, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 0))
        weights = tl.exp(scores - larger)
        correction = tl.exp(largest - larger)
        places = place[:, None] + num_heads * 16 * width + columns[None, :]
        value = tl.load(cache + places, mask, other=0.0).to(tl.float32)
        total = total * correction + tl.sum(weights, 0)
        result = result * correction + tl.sum(weights[:, None] * value, 0)
        largest = larger
    if num_splits == 1:
        result = result / tl.where(total > 0, total, 1.0)
        tl.store(out + token * states + head * width + columns, result.to(out.dtype.element_ty), is_column)
    else:
        part = sums + ((token * num_heads + head) * num_splits + split) * (width + 2)
        tl.store(part + columns, result, is_column)
        tl.store(part + width, largest)
        tl.store(part + width + 1, total)


@triton.jit
def merge_splits(
    out,  # [N, H D]
    sums,  # [N, H, S, D + 2]
    num_heads,
    width,  # D
    num_splits,
    WIDTH: tl.constexpr,
):
    """Add the splits of one token's head. Grid: N, H."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    is_column = columns < width
    first = sums + (token * num_heads + head) * num_splits * (width + 2)
    largest = float("-inf")
    for split in range(num_splits):
        largest = tl.maximum(largest, tl.load(first + split * (width + 2) + width))
    base = tl.where(largest > float("-inf"), largest, 0.0)
    total = 0.0
    result = tl.zeros([WIDTH], tl.float32)
    for split in range(num_splits):
        part = first + split * (width + 2)
        factor = tl.exp(tl.load(part + width) - base)
        total += factor * tl.load(part + width + 1)
        result += factor * tl.load(part + columns, is_column, other=0.0)
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(out + (token * num_heads + head) * width + columns, result.to(out.dtype.element_ty), is_column)
