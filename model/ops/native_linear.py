"""Operators of the native lowering that treat each token by itself: embedding, products, gates, norms, rotation.

Registered with PyTorch as `antiphon::embed`, `linear`, `gate`, `add_norm` and `rotary`, each with an eager reference
and a shape rule. Functional, without gradients. Weights are plain float32 here; packing.py lays them out for the
kernels and quantises them. Schemas of the ONNX nodes: native_translation.py.

Axes: N tokens of a run, packed; K inputs, O outputs of a product; M model width, V vocabulary, F feed-forward width,
H heads, D head width, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from antiphon.model.ops.activations import ACTIVATIONS

_EMBED = "(Tensor input_ids, Tensor positions, Tensor weight, Tensor? position_table, *, float scale) -> Tensor"
_LINEAR = "(Tensor x, Tensor weight, Tensor? bias, *, str activation) -> Tensor"
_GATE = "(Tensor x, *, str activation) -> Tensor"
_ADD_NORM = "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, *, float epsilon, str kind) -> (Tensor, Tensor)"
_ROTARY = "(Tensor qkv, Tensor positions, Tensor table, *, int num_heads) -> Tensor"


@torch.library.custom_op("antiphon::embed", mutates_args=(), schema=_EMBED)
def embed(
    input_ids: Tensor, positions: Tensor, weight: Tensor, position_table: Tensor | None, *, scale: float
) -> Tensor:
    """scale * weight[id] + position_table[position] (Vaswani et al. 2017, sections 3.4 and 3.5).

    input_ids [N] int64; positions [N] int32; weight [V, M] float32; position_table [P, M] float32 or None.
    Returns [N, M] float32.
    """
    vectors = weight[input_ids] * scale
    return vectors if position_table is None else vectors + position_table[positions.long()]


@embed.register_fake
def _embed_shape(
    input_ids: Tensor, positions: Tensor, weight: Tensor, position_table: Tensor | None, *, scale: float
) -> Tensor:
    return weight.new_empty(input_ids.shape[0], weight.shape[1])


@torch.library.custom_op("antiphon::linear", mutates_args=(), schema=_LINEAR)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """activation(x weight^T + bias), activation one of none, relu, gelu, gelu_tanh, silu, tanh.

    x [N, K] float32; weight [O, K]; bias [O] or None. Returns [N, O].
    """
    return ACTIVATIONS[activation](functional.linear(x, weight, bias))


@linear.register_fake
def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("antiphon::gate", mutates_args=(), schema=_GATE)
def gate(x: Tensor, *, activation: str) -> Tensor:
    """activation(first half) * second half of each row (Shazeer 2020): [N, 2 F] float32 -> [N, F]."""
    first, second = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second


@gate.register_fake
def _gate_shape(x: Tensor, *, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.custom_op("antiphon::add_norm", mutates_args=(), schema=_ADD_NORM)
def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, kind: str
) -> tuple[Tensor, Tensor]:
    """The sum x + residual, and its norm: `layer` (Ba et al. 2016) or `rms` (Zhang and Sennrich 2019).

    x [N, M] float32, residual likewise or None (nothing is added); weight, bias [M] or None; epsilon is added to the
    variance or mean square. Returns (normed [N, M], sum [N, M]).
    """
    total = x.clone() if residual is None else x + residual
    if kind == "layer":
        return functional.layer_norm(total, total.shape[1:], weight, bias, epsilon), total
    normed = functional.rms_norm(total, total.shape[1:], weight, epsilon)
    return normed if bias is None else normed + bias, total


@add_norm.register_fake
def _add_norm_shape(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, kind: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("antiphon::rotary", mutates_args=(), schema=_ROTARY)
def rotary(qkv: Tensor, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    """Turn the halves of each query and key against each other by their position's angles (Su et al. 2021, 3.4).

    qkv [N, 3 H D] float32, queries, keys, values; positions [N] int32; table [P, D] float32: of each position cos of
    the D / 2 angles, then sin. Returns [N, 3 H D], values unchanged.
    """
    parts = qkv.reshape(qkv.shape[0], 3, num_heads, table.shape[1])  # [N, 3, H, D]
    cos, sin = table[positions.long()][:, None, None].chunk(2, dim=-1)  # [N, 1, 1, D / 2]
    first, second = parts[:, :2].chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, parts[:, 2:]), dim=1).flatten(1)


@rotary.register_fake
def _rotary_shape(qkv: Tensor, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    return torch.empty_like(qkv)
