"""Kernels of the recurrences that a decoder can have in place of self-attention.

A program computes the new tokens of one row one after the other, and holds the state in registers. The state after n
tokens is vector n mod 2 of two float32 vectors at the beginning of the layer's part of the row's first block, so that a
step with one token a row can run again: the state before it is still there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ssru(
    out,  # [N, M]
    cache,  # [num_blocks, L, 2, H, 16, D]
    gates,  # [N, 2 M]
    bias,  # [2 M]
    tables,  # [R, X]
    rows,  # [N]
    positions,  # [N]
    table_width,  # X
    width,  # M
    part,  # 2 H 16 D: elements of one layer in a block
    num_layers,
    layer,
    flags,  # 1: bias
    BLOCK: tl.constexpr,
):
    """Write relu(c) with c = f c + (1 - f) W x, f = sigmoid(F x + b) (Kim et al. 2019). Grid: N, columns of BLOCK."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(rows + token)
    position = tl.load(positions + token)
    if position < 0:
        tl.store(out + token * width + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask)
        return
    if _follows(rows, row, token):
        return
    states = _states(cache, tables, row, table_width, part, num_layers, layer) + columns
    state = tl.load(states + position % 2 * width, mask & (position > 0), other=0.0)
    has_token = True
    while has_token:
        candidate = tl.load(gates + token * 2 * width + columns, mask, other=0.0).to(tl.float32)
        logit = tl.load(gates + token * 2 * width + width + columns, mask, other=0.0).to(tl.float32)
        if (flags & 1) != 0:
            candidate += tl.load(bias + columns, mask, other=0.0).to(tl.float32)
            logit += tl.load(bias + width + columns, mask, other=0.0).to(tl.float32)
        forget = tl.sigmoid(logit)
        state = forget * state + (1.0 - forget) * candidate
        tl.store(out + token * width + columns, tl.maximum(state, 0.0).to(out.dtype.element_ty), mask)
        token += 1
        position += 1
        tl.store(states + position % 2 * width, state, mask)
        has_token = _has_token(rows, positions, token, row, position)


@triton.jit
def paged_average(
    out,  # [N, M]
    cache,  # [num_blocks, L, 2, H, 16, D]
    x,  # [N, M]
    tables,  # [R, X]
    rows,  # [N]
    positions,  # [N]
    table_width,  # X
    width,  # M
    part,  # 2 H 16 D: elements of one layer in a block
    num_layers,
    layer,
    BLOCK: tl.constexpr,
):
    """Write the average of each token and those before it (Zhang et al. 2018). Grid: N, columns of BLOCK."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(rows + token)
    position = tl.load(positions + token)
    if position < 0:
        tl.store(out + token * width + columns, tl.zeros([BLOCK], out.dtype.element_ty), mask)
        return
    if _follows(rows, row, token):
        return
    states = _states(cache, tables, row, table_width, part, num_layers, layer) + columns
    state = tl.load(states + position % 2 * width, mask & (position > 0), other=0.0)
    has_token = True
    while has_token:
        value = tl.load(x + token * width + columns, mask, other=0.0).to(tl.float32)
        state = (state * position + value) / (position + 1)
        tl.store(out + token * width + columns, state.to(out.dtype.element_ty), mask)
        token += 1
        position += 1
        tl.store(states + position % 2 * width, state, mask)
        has_token = _has_token(rows, positions, token, row, position)


@triton.jit
def _follows(rows, row, token):
    """Return True if the token before is of the same row, whose first new token's program computes this one too."""
    return tl.load(rows + token - 1, token > 0, other=-1) == row


@triton.jit
def _has_token(rows, positions, token, row, position):
    """Return True if a token is the one of a row at a position; padding has row 0 and position -1."""
    is_token = token < tl.num_programs(0)
    is_row = tl.load(rows + token, is_token, other=-1) == row
    return is_row & (tl.load(positions + token, is_token, other=-1) == position)


@triton.jit
def _states(cache, tables, row, table_width, part, num_layers, layer):
    """Return the address of a row's two states of a layer."""
    block = tl.load(tables + row * table_width).to(tl.int64)
    place = cache + (block * num_layers + layer) * part
    return place.to(tl.pointer_type(tl.float32), bitcast=True)
