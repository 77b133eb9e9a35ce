"""Rotation of queries and keys by the angles of their position."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary(
    out,  # [N, 3 H D]
    qkv,  # [N, 3 H D]
    bias,  # [3 H D]
    positions,  # [N]
    table,  # [P, D]
    num_heads,
    width,  # D
    flags,  # 1: bias
    BLOCK: tl.constexpr,  # at least D / 2
):
    """Rotate component i with component i + D / 2; values are copied. Grid: N, 3 * H."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # heads of queries, of keys, of values
    half = width // 2
    columns = tl.arange(0, BLOCK)
    mask = columns < half
    start = token * 3 * num_heads * width + head * width
    first = tl.load(qkv + start + columns, mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + start + half + columns, mask, other=0.0).to(tl.float32)
    if (flags & 1) != 0:
        first += tl.load(bias + head * width + columns, mask, other=0.0).to(tl.float32)
        second += tl.load(bias + head * width + half + columns, mask, other=0.0).to(tl.float32)
    if head < 2 * num_heads:
        position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
        cos = tl.load(table + position * width + columns, mask, other=0.0)
        sin = tl.load(table + position * width + half + columns, mask, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    tl.store(out + start + columns, first.to(out.dtype.element_ty), mask)
    tl.store(out + start + half + columns, second.to(out.dtype.element_ty), mask)
