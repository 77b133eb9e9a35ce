"""Rotary positions: queries and keys rotated by angles that depend on their positions.

Axes: N packed tokens, H heads, D head width, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.ops.operator import Input, Operator, Output
from antiphon.ops.operators.attention_inputs import NUM_HEADS, QKV
from antiphon.ops.torch_registration import register

ROTARY = Operator(
    name="rotary",
    purpose="Rotate pairs of components of each query and key by its position's angles (Su et al. 2021, section 3.4).",
    inputs=(
        QKV,
        Input("positions", "int32", "N", "position of each token in its sequence"),
        Input("table", "float", "P, D", "of each position the cosines of its D / 2 angles, then the sines"),
    ),
    attributes=(NUM_HEADS,),
    outputs=(Output("out", "float", "N, 3 H D", "queries, keys and values; values are unchanged"),),
    shapes=lambda given: [given["qkv"].shape],
)


@register(ROTARY)
def rotary(qkv: Tensor, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    """Rotate; component i is paired with component i + D / 2."""
    parts = qkv.reshape(qkv.shape[0], 3, num_heads, table.shape[1])  # [N, 3, H, D]
    cos, sin = table[positions.long()][:, None, None].chunk(2, dim=-1)  # [N, 1, 1, D / 2]
    first, second = parts[:, :2].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, parts[:, 2:]), dim=1).flatten(1)
