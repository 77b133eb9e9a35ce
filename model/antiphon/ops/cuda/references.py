"""Eager PyTorch functions that compute the nodes of nodes.py, one for each: what the kernels are compared with.

A function takes a node's inputs in their order, None for an optional one that is absent, and its attributes as
keywords. It returns the outputs that are not workspace: one tensor, or a tuple. Numbers are computed in float32 and
rounded where the kernel rounds. `paged_write` changes the cache in place.

Axes are those of nodes.py; Q queries and T keys of one sequence or row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.cuda.nodes import TILE
from antiphon.ops.sampling import SamplingArrays
from antiphon.ops.sampling import sample as sample_in_numpy


def embed(
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_table: Tensor | None,
    rows: Tensor | None,
    previous: Tensor | None,
    types: Tensor | None,
    type_table: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """Return the sum of the vectors of each token, its position and its type."""
    ids = tokens.long()
    if rows is not None and previous is not None:
        ids = torch.where(ids < 0, previous[rows.long()].long(), ids)
    vectors = weight[ids.clamp(min=0)].float() * scale
    if position_table is not None:
        vectors = vectors + position_table[positions.long().clamp(min=0)].float()
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
    total = _added(x, bias)
    if residual is not None:
        total = total + residual.float()
    total = total.to(x.dtype)
    value = total.float()
    if kind == "layer":
        value = value - value.mean(1, keepdim=True)
    normed = value * torch.rsqrt(value.square().mean(1, keepdim=True) + epsilon)
    if weight is not None:
        normed = normed * weight.float()
    return _added(normed, norm_bias).to(x.dtype), total


def activate(x: Tensor, bias: Tensor | None, *, activation: str, gated: bool) -> Tensor:
    """Return the activated product."""
    value, function = _added(x, bias), ACTIVATIONS[activation]
    if not gated:
        return function(value).to(x.dtype)
    first, second = value.chunk(2, dim=1)
    return (function(first) * second).to(x.dtype)


def rotary(qkv: Tensor, bias: Tensor | None, positions: Tensor, table: Tensor, *, num_heads: int) -> Tensor:
    """Return rotated queries and keys; component i is paired with component i + D / 2."""
    parts = _added(qkv, bias).reshape(len(qkv), 3, num_heads, table.shape[1])
    cos, sin = table[positions.long().clamp(min=0)][:, None, None].chunk(2, dim=-1)  # [N, 1, 1, D / 2]
    first, second = parts[:, :2].chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated, parts[:, 2:]), dim=1).flatten(1).to(qkv.dtype)


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
    """Attend from the queries of each tile; tokens that no tile holds get zeros, where the kernel writes nothing."""
    states = _added(qkv, bias).to(qkv.dtype)
    out = qkv.new_zeros(len(qkv), qkv.shape[1] // 3)
    for sequence, first in tiles.tolist():
        if sequence < 0:
            continue
        begin, end = offsets[sequence : sequence + 2].tolist()
        queries = torch.arange(first, min(first + TILE, end - begin))
        query, key, value = _heads(states[begin:end].float(), 3, num_heads)
        distance = torch.arange(end - begin) - queries[:, None]  # [Q, T]
        scores = torch.einsum("qhd,thd->hqt", query[queries], key) * scale
        scores = scores + _score_bias(distance, bias_table, slopes)
        if causal:
            scores = scores.masked_fill(distance > 0, float("-inf"))
        weights = torch.exp(scores - scores.amax(2, keepdim=True))
        sums = torch.einsum("hqt,thd->qhd", weights.to(qkv.dtype).float(), value)
        result = sums / weights.sum(2).T[:, :, None]
        out[begin + queries] = result.flatten(1).to(qkv.dtype)
    return out


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
    *_, keys, values = _heads(_added(kv, bias).to(kv.dtype), parts, num_heads)
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
    width = num_heads * cache.shape[-1]
    states = _added(query[:, :width], None if bias is None else bias[:width]).to(query.dtype).float()
    out = query.new_zeros(len(query), width)
    for token, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        keys, values = _cached(cache, layer, tables[row], length)  # [H, T, D]
        distance = torch.arange(length) - (length - 1)
        scores = torch.einsum("hd,htd->ht", states[token].reshape(num_heads, -1), keys) * scale
        scores = scores + _score_bias(distance[None], bias_table, slopes)[:, 0]
        out[token] = torch.einsum("ht,htd->hd", scores.softmax(1), values).flatten().to(query.dtype)
    return out


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
    "CudaPick": pick,
    "CudaSample": sample,
}
"""Function of each node, by the node's name."""


def _added(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias in float32."""
    return x.float() if bias is None else x.float() + bias.float()


def _heads(packed: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """Split [N, parts H D] into its parts, each [N, H, D]."""
    return packed.reshape(len(packed), parts, num_heads, -1).unbind(1)


def _score_bias(distance: Tensor, bias_table: Tensor | None, slopes: Tensor | None) -> Tensor:
    """Return the bias of scores at distances key - query [Q, T]; [H, Q, T], or [1, 1, 1] where there is none."""
    bias = torch.zeros(1, 1, 1)
    if bias_table is not None:
        reach = bias_table.shape[1] // 2
        bias = bias + bias_table[:, distance.clamp(-reach, reach) + reach]
    if slopes is not None:
        bias = bias - slopes[:, None, None] * distance.abs()
    return bias


def _cached(cache: Tensor, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions 0 to length - 1, each [H, T, D] float32."""
    blocks = cache[table[: blocks_for(length)].long(), layer]  # [blocks, 2, H, 16, D]
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()
    return keys, values


def _columns(found: np.ndarray[Any, Any], count: int, absent: float) -> Tensor:
    """Return the first `count` columns of [K, k], completed with `absent`."""
    padded = np.full((len(found), count), absent, found.dtype)
    padded[:, : found.shape[1]] = found[:, :count]
    return torch.from_numpy(padded)
