"""Embedding of tokens, positions and types."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed(
    out,  # [N, M]
    tokens,  # [N]
    positions,  # [N]
    weight,  # [V, M]
    position_table,  # [P, M]
    rows,  # [N]
    previous,  # [R]
    types,  # [N]
    type_table,  # [types, M]
    width,
    scale,
    flags,  # 1: position_table, 2: rows and previous, 4: types
    BLOCK: tl.constexpr,
):
    """Write scale * weight[token] + position_table[position] + type_table[type]. Grid: N."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + index)
    if (flags & 2) != 0:  # noqa: SIM102 - Triton evaluates both sides of `and`
        if token < 0:
            token = tl.load(previous + tl.load(rows + index))
    token = tl.maximum(token, 0).to(tl.int64)  # a row without a valid token before it is padding: read token 0
    position = tl.maximum(tl.load(positions + index), 0).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        vector = tl.load(weight + token * width + columns, mask, other=0.0).to(tl.float32) * scale
        if (flags & 1) != 0:
            vector += tl.load(position_table + position * width + columns, mask, other=0.0).to(tl.float32)
        if (flags & 4) != 0:
            type_id = tl.load(types + index).to(tl.int64)
            vector += tl.load(type_table + type_id * width + columns, mask, other=0.0).to(tl.float32)
        tl.store(out + index * width + columns, vector.to(out.dtype.element_ty), mask)
