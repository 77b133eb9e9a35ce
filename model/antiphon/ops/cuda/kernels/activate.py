"""Activation of a product with its bias, gated or not."""

from __future__ import annotations

import triton
import triton.language as tl


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
