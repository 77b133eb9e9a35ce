"""Recurrences that a decoder can have in place of self-attention. The state of a row has a constant size.

States are in the pool of cache_geometry.py, in the first block of each row.

Axes: N packed tokens, R rows, X width of a block table, M model width, L layers, C heads of the pool, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from antiphon.ops.operator import Input, Operator, Output, PackedWeight, register
from antiphon.ops.operators.attention import token_ranges
from antiphon.ops.operators.linear import linear
from antiphon.ops.operators.rows import add_norm
from antiphon.ops.shared_inputs import (
    BLOCK_TABLES,
    CACHE,
    LAYER,
    NORM,
    NORM_WEIGHTS,
    OUTLIERS,
    PARTS,
    ROW_OFFSETS,
    SUBLAYER_INPUTS,
    SUBLAYER_OUTPUTS,
)

_ROWS = (
    replace(CACHE, meaning="the pool of cache_geometry.py; the layer's part of a block begins with two states"),
    replace(BLOCK_TABLES, meaning="blocks of each row; only the first is read"),
    ROW_OFFSETS,
    Input("positions", "int32", "N", "position of each new token in its row; the state before position 0 is zero"),
)
_PRESENT = Output("present", "cache", CACHE.axes, "the cache with the states after the new tokens", updates="cache")

SSRU_SUBLAYER = Operator(
    name="ssru_sublayer",
    purpose=(
        "norm(residual + relu(c)) for the state c = f c' + (1 - f) W x with f = sigmoid(F x + b), where c' is the state"
        " after the token before (Kim et al. 2019, section 3.2)."
    ),
    inputs=(
        *SUBLAYER_INPUTS,
        Input("gates_weight", "float", "2 M, M", "W and F"),
        Input("gates_bias", "float", "2 M", "added to W x and F x", optional=True),
        *NORM_WEIGHTS,
        *_ROWS,
    ),
    attributes=(LAYER, *NORM),
    outputs=(*SUBLAYER_OUTPUTS, _PRESENT),
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape, inputs["cache"].shape],
    weights=(PackedWeight(name="gates_weight", sizes=(), parts=PARTS, outliers=OUTLIERS),),
)

PAGED_AVERAGE = Operator(
    name="paged_average",
    purpose="The average of each new token and all tokens of its row before it (Zhang et al. 2018, section 3.1).",
    inputs=(Input("x", "float", "N, M", "states"), *_ROWS),
    attributes=(LAYER,),
    outputs=(Output("average", "float", "N, M", "averages"), _PRESENT),
    shapes=lambda inputs: [inputs["x"].shape, inputs["cache"].shape],
)


@register(SSRU_SUBLAYER)
def ssru_sublayer(
    x: Tensor,
    residual: Tensor,
    gates_weight: Tensor,
    gates_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    *,
    layer: int,
    epsilon: float,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply, run over the tokens of each row with the states in a copy of the cache, add and normalise."""
    gates = linear(x, gates_weight, gates_bias, activation="none")
    out, present = ssru(gates, cache, block_tables, offsets, positions, layer=layer)
    normed, total = add_norm(out, residual, norm_weight, norm_bias, epsilon=epsilon, kind=kind)
    return normed, total, present


def ssru(
    gates: Tensor, cache: Tensor, block_tables: Tensor, offsets: Tensor, positions: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    """Return relu of the states [N, M] and the changed cache for gates [N, 2 M]: W x, then F x + b."""
    candidates, logits = gates.chunk(2, dim=1)
    forget = torch.sigmoid(logits)

    def after(state: Tensor, token: int, _: int) -> Tensor:
        return forget[token] * state + (1 - forget[token]) * candidates[token]

    states, present = _run(after, candidates.shape, cache, block_tables, offsets, positions, layer)
    return states.relu(), present


@register(PAGED_AVERAGE)
def paged_average(
    x: Tensor, cache: Tensor, block_tables: Tensor, offsets: Tensor, positions: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    """Run over the tokens of each row, with the averages in a copy of the cache."""

    def after(state: Tensor, token: int, position: int) -> Tensor:
        return (state * position + x[token]) / (position + 1)

    return _run(after, x.shape, cache, block_tables, offsets, positions, layer)


def _run(
    after: Callable[[Tensor, int, int], Tensor],
    shape: torch.Size,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Return the states [N, M] after each token, and a copy of the cache with the last two of each row.

    after: returns the state after a token, from the state before it, the token's index and its position.
    """
    cache, states = cache.clone(), torch.zeros(shape)
    for table, (start, stop) in zip(block_tables.tolist(), token_ranges(offsets), strict=True):
        for token in range(start, stop):
            position = int(positions[token])
            kept = row_states(cache, table[0], layer, shape[1])
            before = kept[position % 2] if position else torch.zeros(shape[1])
            states[token] = kept[(position + 1) % 2] = after(before, token, position)
    return states, cache


def row_states(cache: Tensor, block: int, layer: int, width: int) -> Tensor:
    """Return a view of the two states [2, M] of a layer in a block: float32 also in a float16 cache."""
    return cache[block, layer].flatten().view(torch.float32)[: 2 * width].view(2, width)
