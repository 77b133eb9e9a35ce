"""Dropout (Srivastava et al. 2014) with cheap random numbers on a CPU.

PyTorch draws a double from a Mersenne Twister for each element on a CPU, which took a tenth of a small model's training
step. Here each random byte decides one element, so the probability is a multiple of 1/256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Dropout(nn.Module):
    """Sets elements to 0 with probability p during training, and scales the others by 1 / (1 - p).

    On a CPU p is rounded to a multiple of 1/256, with the scale of the rounded value.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some elements dropped, or x itself outside training."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return functional.dropout(x, self.p)
        return _ByteDropout.apply(x, round(256 * self.p))  # type: ignore[no-any-return,no-untyped-call]


class _ByteDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int) -> Tensor:
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        is_kept = words.view(torch.uint8)[: x.numel()].view(x.shape) >= threshold
        ctx.save_for_backward(is_kept)
        ctx.scale = 256 / (256 - threshold)
        return torch.ops.aten.native_dropout_backward(x, is_kept, ctx.scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (is_kept,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(upstream[0], is_kept, ctx.scale), None
