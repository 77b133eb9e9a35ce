"""Residual sum and the norm after it, in one operator.

Axes: N packed tokens, M model width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from antiphon.ops.operator import Input, Operator, Output, register
from antiphon.ops.shared_inputs import NORM

ADD_NORM = Operator(
    name="add_norm",
    purpose="The sum x + residual, and its norm: LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019).",
    inputs=(
        Input("x", "float", "N, M", "output of a sublayer"),
        Input("residual", "float", "N, M", "added to x", optional=True),
        Input("weight", "float", "M", "factors after the norm", optional=True),
        Input("bias", "float", "M", "added after the norm", optional=True),
    ),
    attributes=NORM,
    outputs=(
        Output("normed", "float", "N, M", "norm of the sum"),
        Output("sum", "float", "N, M", "the sum itself"),
    ),
    shapes=lambda given: [given["x"].shape, given["x"].shape],
)


@register(ADD_NORM)
def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Add and normalise; without a residual the sum is a copy of x."""
    total = x.clone() if residual is None else x + residual
    if kind == "layer":
        return functional.layer_norm(total, total.shape[1:], weight, bias, epsilon), total
    normed = functional.rms_norm(total, total.shape[1:], weight, epsilon)
    return normed if bias is None else normed + bias, total
