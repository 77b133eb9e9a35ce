"""Products with a weight, and the gate between the products of a gated feed-forward layer.

Axes: N packed tokens; K inputs, O outputs of a product; F feed-forward width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.operator import Attribute, Input, Operator, Output, PackedWeight
from antiphon.ops.operators import packed_weights
from antiphon.ops.torch_registration import register

ACTIVATION = Attribute("activation", str, f"one of {', '.join(ACTIVATIONS)}")

LINEAR = Operator(
    name="linear",
    purpose="activation(x weight^T + bias).",
    inputs=(
        Input("x", "float", "N, K", "states"),
        Input("weight", "float", "O, K", "weight as PyTorch stores it"),
        Input("bias", "float", "O", "added to every row", optional=True),
    ),
    attributes=(ACTIVATION,),
    outputs=(Output("out", "float", "N, O", "product"),),
    shapes=lambda given: [(given["x"].shape[0], given["weight"].shape[0])],
    weights=(
        PackedWeight(
            sizes=("width",),
            parts={"float32": packed_weights.FLOAT32, "int8": packed_weights.INT8, "int4": packed_weights.INT4},
        ),
    ),
)

GATE = Operator(
    name="gate",
    purpose="activation(first half of a row) * second half (Shazeer 2020).",
    inputs=(Input("x", "float", "N, 2 F", "both products of a gated layer, side by side"),),
    attributes=(ACTIVATION,),
    outputs=(Output("out", "float", "N, F", "gated product"),),
    shapes=lambda given: [(given["x"].shape[0], given["x"].shape[1] // 2)],
)


@register(LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Multiply and activate."""
    return ACTIVATIONS[activation](functional.linear(x, weight, bias))


@register(GATE)
def gate(x: Tensor, *, activation: str) -> Tensor:
    """Activate the first half of each row and multiply it by the second."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second
