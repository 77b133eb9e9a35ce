"""Attention from single tokens over cache blocks, for self and cross attention (Kwon et al. 2023, section 4.1)."""

from __future__ import annotations

import triton
import triton.language as tl


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
