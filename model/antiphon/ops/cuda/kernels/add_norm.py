"""Sum of a product, its bias and the residual, and the norm of the sum."""

from __future__ import annotations

import triton
import triton.language as tl


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
