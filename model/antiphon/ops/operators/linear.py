"""Products with a weight, and the gate between the products of a gated feed-forward layer.

Axes: N packed tokens; K inputs, O outputs of a product; F feed-forward width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.operator import Attribute, Input, Operator, Output, PackedWeight, register
from antiphon.ops.shared_inputs import FLOAT32_WEIGHT, INT4_WEIGHT, INT8_WEIGHT, OUTLIERS

LINEAR = Operator(
    name="linear",
    purpose="activation(x weight^T + bias).",
    inputs=(
        Input("x", "float", "N, K", "states"),
        Input("weight", "float", "O, K", "weight as PyTorch stores it"),
        Input("bias", "float", "O", "added to every row", optional=True),
    ),
    attributes=(Attribute("activation", str, f"one of {', '.join(ACTIVATIONS)}"),),
    outputs=(Output("out", "float", "N, O", "product"),),
    shapes=lambda inputs: [(inputs["x"].shape[0], inputs["weight"].shape[0])],
    weights=(
        PackedWeight(
            sizes=("width",),
            parts={"float32": FLOAT32_WEIGHT, "int8": INT8_WEIGHT, "int4": INT4_WEIGHT},
            outliers=OUTLIERS,
        ),
    ),
)


@register(LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Multiply and activate."""
    return ACTIVATIONS[activation](functional.linear(x, weight, bias))


def gate(x: Tensor, *, activation: str) -> Tensor:
    """Activate the first half of each row of x [N, 2 F] and multiply it by the second (Shazeer 2020)."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second
