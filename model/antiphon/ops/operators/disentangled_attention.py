"""Disentangled attention of packed sequences: scores of relative positions beside those of content.

Axes: N packed tokens, B sequences, H heads, D head width, P rows of the tables of positions, T tokens of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.ops.attention import attention
from antiphon.ops.disentangled import position_scores
from antiphon.ops.operator import Input, Operator, Output, register
from antiphon.ops.operators.eager_attention import split_heads, token_ranges
from antiphon.ops.shared_inputs import NUM_HEADS, QKV, SCALE, SOURCE_OFFSETS

DISENTANGLED_ATTENTION = Operator(
    name="disentangled_attention",
    purpose=(
        "Attention of each packed sequence over itself, without padding, with scores of relative positions (He et al."
        " 2021, section 3.1)."
    ),
    inputs=(
        QKV,
        SOURCE_OFFSETS,
        Input(
            "position_rows",
            "int32",
            "2 * reach + 1",
            "row of the tables by distance query - key, never falling; the outermost entries cover larger distances",
        ),
        Input("position_keys", "float", "P, H D", "keys of relative positions", optional=True),
        Input("position_queries", "float", "P, H D", "queries of relative positions", optional=True),
    ),
    attributes=(NUM_HEADS, SCALE),
    outputs=(Output("out", "float", "N, H D", "weighted sums of values"),),
    shapes=lambda given: [(given["qkv"].shape[0], given["qkv"].shape[1] // 3)],
)


@register(DISENTANGLED_ATTENTION)
def disentangled_attention(
    qkv: Tensor,
    offsets: Tensor,
    position_rows: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attend sequence by sequence; `disentangled.py` defines the scores."""
    attended = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    reach = len(position_rows) // 2
    for start, stop in token_ranges(offsets):
        query, key, value = (part[None] for part in split_heads(qkv[start:stop], 3, num_heads))  # [1, T, H, D]
        positions = torch.arange(stop - start)
        rows = position_rows[(positions[:, None] - positions).clamp(-reach, reach) + reach].long()
        bias = position_scores(query, key, position_keys, position_queries, rows) * scale
        attended[start:stop] = attention(query, key, value, None, bias, causal=False, scale=scale)[0].flatten(1)
    return attended
