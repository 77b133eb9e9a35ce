"""Operators that compute each token by itself: embedding, and the residual sum with the norm after it.

Axes: N packed tokens, M model width, V vocabulary, P positions.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from antiphon.ops.operator import Attribute, Input, Operator, Output, PackedWeight, register
from antiphon.ops.shared_inputs import FLOAT32_WEIGHT, INT8_WEIGHT, NORM

EMBED = Operator(
    name="embed",
    purpose="scale * weight[id] + position_table[position] (Vaswani et al. 2017, sections 3.4 and 3.5).",
    inputs=(
        Input("input_ids", "int64", "N", "token ids"),
        Input("positions", "int32", "N", "position of each token in its sequence"),
        Input("weight", "float", "V, M", "vector of each token of the vocabulary"),
        Input("position_table", "float", "P, M", "vector of each position", optional=True),
    ),
    attributes=(Attribute("scale", float, "factor of the token vectors"),),
    outputs=(Output("out", "float", "N, M", "embedded tokens"),),
    shapes=lambda inputs: [(inputs["input_ids"].shape[0], inputs["weight"].shape[1])],
    weights=(
        PackedWeight(
            sizes=("vocab", "width"),
            # An embedding reads single rows, so it needs no column sums.
            parts={"float32": FLOAT32_WEIGHT, "int8": INT8_WEIGHT[:2]},
        ),
    ),
)


@register(EMBED)
def embed(
    input_ids: Tensor, positions: Tensor, weight: Tensor, position_table: Tensor | None, *, scale: float
) -> Tensor:
    """Return the embedding of every token."""
    vectors = weight[input_ids] * scale
    return vectors if position_table is None else vectors + position_table[positions.long()]


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
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape],
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
