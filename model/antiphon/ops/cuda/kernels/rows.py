"""Kernels that compute each token by itself: embedding, norm, activation, gates, rotary positions, picked states."""

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
    previous,  # [R]
    types,  # [N]
    type_table,  # [types, M]
    width,
    scale,
    flags,  # 1: position_table, 2: previous, 4: types
    BLOCK: tl.constexpr,
):
    """Write scale * weight[token] + position_table[position] + type_table[type]. Grid: N."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + index)
    if (flags & 2) != 0:  # noqa: SIM102 - Triton evaluates both sides of `and`
        if token < 0:
            token = tl.load(previous - 1 - token)
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


@triton.jit
def add_norm(
    normed,  # [N, M]
    total,  # [N, M]
    x,  # [N, M]
    bias,  # [M]
    residual,  # [N, M]
    weight,  # [M]
    norm_bias,  # [M]
    width,
    epsilon,
    flags,  # 1: bias, 2: residual, 4: weight, 8: norm_bias, 16: RMSNorm
    BLOCK: tl.constexpr,
):
    """Write the sum, rounded to its type, and the norm of the rounded sum. Grid: N."""
    row = tl.program_id(0).to(tl.int64) * width
    square = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        value = tl.load(x + row + columns, mask, other=0.0).to(tl.float32)
        if (flags & 1) != 0:
            value += tl.load(bias + columns, mask, other=0.0).to(tl.float32)
        if (flags & 2) != 0:
            value += tl.load(residual + row + columns, mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask)
        value = rounded.to(tl.float32)
        plain += value
        square += value * value
    mean = 0.0
    variance = tl.sum(square, 0) / width
    if (flags & 16) == 0:
        mean = tl.sum(plain, 0) / width
        # A second pass over the differences keeps the variance exact where it is small beside the mean.
        square = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < width
            value = tl.load(total + row + columns, mask, other=0.0).to(tl.float32) - mean
            square += tl.where(mask, value * value, 0.0)
        variance = tl.sum(square, 0) / width
    factor = 1.0 / tl.sqrt(variance + epsilon)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        value = (tl.load(total + row + columns, mask, other=0.0).to(tl.float32) - mean) * factor
        if (flags & 4) != 0:
            value *= tl.load(weight + columns, mask, other=0.0).to(tl.float32)
        if (flags & 8) != 0:
            value += tl.load(norm_bias + columns, mask, other=0.0).to(tl.float32)
        tl.store(normed + row + columns, value.to(normed.dtype.element_ty), mask)


@triton.jit
def _activated(x, activation):
    """Return the activation of this index in nodes.ACTIVATIONS."""
    result = x
    if activation == 1:
        result = tl.maximum(x, 0.0)
    elif activation == 2:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == 3:
        # 0.5 * (1 + tanh(y)) is the logistic function of 2 y.
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif activation == 4:
        result = x * tl.sigmoid(x)
    elif activation == 5:
        result = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif activation == 6:
        result = x * tl.sigmoid(1.702 * x)
    return result


@triton.jit
def activate(
    out,  # [N, F]
    x,  # [N, F], gated: [N, 2 F]
    bias,  # as wide as x
    width,  # F
    activation,
    flags,  # 1: bias, 2: gated
    BLOCK: tl.constexpr,
):
    """Write activation(x + bias), or activation(first half) * second half. Grid: N, columns of BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    stride = width
    if (flags & 2) != 0:
        stride = 2 * width
    value = tl.load(x + row * stride + columns, mask, other=0.0).to(tl.float32)
    if (flags & 1) != 0:
        value += tl.load(bias + columns, mask, other=0.0).to(tl.float32)
    value = _activated(value, activation)
    if (flags & 2) != 0:
        second = tl.load(x + row * stride + width + columns, mask, other=0.0).to(tl.float32)
        if (flags & 1) != 0:
            second += tl.load(bias + width + columns, mask, other=0.0).to(tl.float32)
        value *= second
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask)


@triton.jit
def gated_sum(
    out,  # [N, M]
    x,  # [N, M]
    x_gate,  # [N, M]
    x_bias,  # [M]
    y,  # [N, M]
    y_gate,  # [N, M]
    y_bias,  # [M]
    width,  # M
    flags,  # 1: x_bias, 2: y_bias
    BLOCK: tl.constexpr,
):
    """Write sigmoid(x_gate + x_bias) * x + sigmoid(y_gate + y_bias) * y. Grid: N, columns of BLOCK."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x_factor = tl.load(x_gate + row + columns, mask, other=0.0).to(tl.float32)
    y_factor = tl.load(y_gate + row + columns, mask, other=0.0).to(tl.float32)
    if (flags & 1) != 0:
        x_factor += tl.load(x_bias + columns, mask, other=0.0).to(tl.float32)
    if (flags & 2) != 0:
        y_factor += tl.load(y_bias + columns, mask, other=0.0).to(tl.float32)
    first = tl.sigmoid(x_factor) * tl.load(x + row + columns, mask, other=0.0).to(tl.float32)
    second = tl.sigmoid(y_factor) * tl.load(y + row + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (first + second).to(out.dtype.element_ty), mask)


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


@triton.jit
def pick(
    out,  # [K, M]
    hidden,  # [N, M]
    picks,  # [K]
    width,  # M
    BLOCK: tl.constexpr,
):
    """Copy one state. Grid: K."""
    sample = tl.program_id(0).to(tl.int64)
    token = tl.load(picks + sample).to(tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        tl.store(out + sample * width + columns, tl.load(hidden + token * width + columns, mask), mask)
