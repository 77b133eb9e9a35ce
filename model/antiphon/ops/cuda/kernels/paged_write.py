"""Writes of keys and values to cache blocks."""

from __future__ import annotations

import triton
import triton.language as tl


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
