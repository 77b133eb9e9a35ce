"""Attention of packed sequences, each over itself, without padding.

Axes: N packed tokens, B sequences, H heads, D head width, T tokens of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.ops.attention import attention
from antiphon.ops.operator import Attribute, Operator, Output
from antiphon.ops.operators.attention_inputs import (
    BIAS_TABLE,
    NUM_HEADS,
    QKV,
    SCALE,
    SLOPES,
    SOURCE_OFFSETS,
    score_bias,
    split_heads,
    token_ranges,
)
from antiphon.ops.torch_registration import register

PACKED_ATTENTION = Operator(
    name="packed_attention",
    purpose="Attention of each packed sequence over itself (Vaswani et al. 2017, section 3.2.1), without padding.",
    inputs=(QKV, SOURCE_OFFSETS, BIAS_TABLE, SLOPES),
    attributes=(
        NUM_HEADS,
        SCALE,
        Attribute("causal", bool, "each token sees itself and the tokens before it only"),
    ),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
    shapes=lambda given: [(given["qkv"].shape[0], given["qkv"].shape[1] // 3)],
)


@register(PACKED_ATTENTION)
def packed_attention(
    qkv: Tensor,
    offsets: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend sequence by sequence."""
    attended = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for start, stop in token_ranges(offsets):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        bias = score_bias(torch.arange(stop - start), stop - start, bias_table, slopes)
        result = attention(query[None], key[None], value[None], None, bias, causal=causal, scale=scale)
        attended[start:stop] = result[0].flatten(1)
    return attended
