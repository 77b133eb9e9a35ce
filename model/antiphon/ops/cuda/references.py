"""Eager PyTorch functions that compute the nodes of nodes.py, one for each: what the kernels are compared with.

A function takes a node's inputs in their order, None for an optional one that is absent, and its attributes as
keywords. It returns the outputs that are not workspace: one tensor, or a tuple. Where a node computes what an operator
of ops/operators does, the operator's eager function computes it, in float32; here the bias of a product is added
before, and the result is rounded where the kernel rounds. `paged_write` and the recurrences change the cache in
place.

Axes are those of nodes.py; T positions of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.attention import attention
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.operators import attention as eager_attention
from antiphon.ops.operators import recurrence as eager_recurrence
from antiphon.ops.operators.attention import score_bias, split_heads
from antiphon.ops.operators.linear import gate
from antiphon.ops.operators.rows import add_norm as eager_add_norm
from antiphon.ops.operators.rows import embed as eager_embed
from antiphon.ops.sampling import SamplingArrays
from antiphon.ops.sampling import sample as sample_in_numpy


def embed(
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_table: Tensor | None,
    previous: Tensor | None,
    types: Tensor | None,
    type_table: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """Return the sum of the vectors of each token, its position and its type."""
    ids = tokens.long()
    if previous is not None:
        ids = torch.where(ids < 0, previous[(-1 - ids).clamp(min=0)].long(), ids)
    used = weight[ids.clamp(min=0)].float()
    vectors: Tensor = eager_embed(
        torch.arange(len(ids)), positions.clamp(min=0), used, _in_float32(position_table), scale=scale
    )
    if types is not None and type_table is not None:
        vectors = vectors + type_table[types.long()].float()
    return vectors.to(weight.dtype)


def add_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    epsilon: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the rounded sum, and the sum."""
    total = _added(_added(x, bias), residual).to(x.dtype)
    factors = _in_float32(weight), _in_float32(norm_bias)
    normed, _ = eager_add_norm(total.float(), None, *factors, epsilon=epsilon, kind=kind)
    return normed.to(x.dtype), total


def activate(x: Tensor, bias: Tensor | None, *, activation: str, gated: bool) -> Tensor:
    """Return the activated product."""
    value = _added(x, bias)
    out = gate(value, activation=activation) if gated else ACTIVATIONS[activation](value)
    return out.to(x.dtype)


def rotary(qkv: Tensor, bias: Tensor | None, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    """Return rotated queries and keys."""
    rotated = eager_attention.rotary(_added(qkv, bias), positions.clamp(min=0), table, num_heads=num_heads)
    return rotated.to(qkv.dtype)


def packed_attention(
    qkv: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    tiles: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attend sequence by sequence, without tiles; padding gets zeros, where the kernel writes nothing."""
    del tiles
    states = _added(qkv, bias).to(qkv.dtype).float()
    out = eager_attention.packed_attention(
        states, offsets, bias_table, slopes, num_heads=num_heads, scale=scale, causal=causal
    )
    return out.to(qkv.dtype)


def paged_write(
    kv: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    layer: int,
) -> Tensor:
    """Write keys and values into the cache, which is changed in place; tokens of negative positions write nothing."""
    parts = kv.shape[1] // (num_heads * cache.shape[-1])
    *_, keys, values = split_heads(_added(kv, bias).to(kv.dtype), parts, num_heads)
    tokens = torch.nonzero(positions >= 0).flatten()
    places = positions[tokens].long()
    blocks = tables[rows[tokens].long(), places // BLOCK_SIZE].long()
    cache[blocks, layer, 0, :, places % BLOCK_SIZE] = keys[tokens]
    cache[blocks, layer, 1, :, places % BLOCK_SIZE] = values[tokens]
    return torch.ones(1, dtype=torch.int32)


def paged_attention(
    query: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    written: Tensor | None,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> Tensor:
    """Attend from each token to the first positions of its row; no other position of the cache is read."""
    del written  # an order of nodes only
    width = num_heads * cache.shape[-1]
    states = _added(query[:, :width], None if bias is None else bias[:width]).to(query.dtype).float()
    out = query.new_zeros(len(query), width)
    for token, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        keys, values = _cached(cache, layer, tables[row], length)  # [T, H, D]
        biases = score_bias(torch.tensor([length - 1]), length, bias_table, slopes)
        query_heads = states[token].reshape(1, 1, num_heads, -1)
        attended = attention(query_heads, keys[None], values[None], None, biases, causal=False, scale=scale)
        out[token] = attended.flatten().to(query.dtype)
    return out


def ssru(
    gates: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    layer: int,
) -> Tensor:
    """Return relu of the states, which are changed in the cache in place; padding gets zeros."""
    offsets = _offsets(tables, rows, positions)
    out, present = eager_recurrence.ssru(_added(gates, bias), cache, tables, offsets, positions, layer=layer)
    cache.copy_(present)
    return out.to(gates.dtype)


def paged_average(x: Tensor, cache: Tensor, tables: Tensor, rows: Tensor, positions: Tensor, *, layer: int) -> Tensor:
    """Return the averages, which are changed in the cache in place; padding gets zeros."""
    offsets = _offsets(tables, rows, positions)
    averages: Tensor
    averages, present = eager_recurrence.paged_average(x.float(), cache, tables, offsets, positions, layer=layer)
    cache.copy_(present)
    return averages.to(x.dtype)


def gated_sum(
    x: Tensor, x_gate: Tensor, x_bias: Tensor | None, y: Tensor, y_gate: Tensor, y_bias: Tensor | None
) -> Tensor:
    """Return the sum of two terms, each times the sigmoid of its gate."""
    out = _added(x_gate, x_bias).sigmoid() * x.float() + _added(y_gate, y_bias).sigmoid() * y.float()
    return out.to(x.dtype)


def pick(hidden: Tensor, picks: Tensor) -> Tensor:
    """Return the states of the picked tokens."""
    return hidden[picks.long()]


def sample(
    logits: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    float_params: Tensor,
    int_params: Tensor,
    edit_offsets: Tensor,
    edit_ids: Tensor,
    edit_rounds: Tensor,
    edit_values: Tensor,
    candidates: Tensor,
) -> tuple[Tensor, ...]:
    """Sample as `sample` of sampling.py does; `edit_rounds` only tells the kernel the order that the edits have."""
    sampling = SamplingArrays(
        picks=np.arange(len(logits), dtype=np.int32),
        float_params=float_params.numpy(),
        int_params=int_params.numpy(),
        edit_offsets=edit_offsets.numpy(),
        edit_ids=edit_ids.numpy(),
        edit_values=edit_values.numpy(),
    )
    samples = sample_in_numpy(_added(logits, bias).numpy(), sampling, positions.numpy())
    count = len(candidates)
    return (
        torch.from_numpy(samples.token_ids).int(),
        torch.from_numpy(samples.logprobs),
        _columns(samples.top_ids, count, -1).int(),
        _columns(samples.top_logprobs, count, 0.0),
        _columns(samples.top_scores, count, -np.inf),
    )


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "CudaEmbed": embed,
    "CudaAddNorm": add_norm,
    "CudaActivate": activate,
    "CudaRotary": rotary,
    "CudaPackedAttention": packed_attention,
    "CudaPagedWrite": paged_write,
    "CudaPagedAttention": paged_attention,
    "CudaSsru": ssru,
    "CudaPagedAverage": paged_average,
    "CudaGatedSum": gated_sum,
    "CudaPick": pick,
    "CudaSample": sample,
}
"""Function of each node, by the node's name."""


def _in_float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _added(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias in float32."""
    return x.float() if bias is None else x.float() + bias.float()


def _offsets(tables: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return the first new token of each row, and the end of the last row, behind which there is only padding."""
    counts = torch.bincount(rows[positions >= 0], minlength=len(tables))
    return functional.pad(counts.cumsum(0), (1, 0)).int()


def _cached(cache: Tensor, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions 0 to length - 1, each [T, H, D] float32."""
    blocks = cache[table[: blocks_for(length)].long(), layer]  # [blocks, 2, H, 16, D]
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length].float()
    return keys, values


def _columns(table: np.ndarray[Any, Any], count: int, absent: float) -> Tensor:
    """Return the first `count` columns of [K, k], completed with `absent`."""
    padded = np.full((len(table), count), absent, table.dtype)
    padded[:, : table.shape[1]] = table[:, :count]
    return torch.from_numpy(padded)
