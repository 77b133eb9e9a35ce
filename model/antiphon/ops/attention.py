"""Eager scaled dot-product attention, the reference that every fused kernel is compared with.

Causal, padded and cross attention differ only in the keys that a query can see, so they are one function. Cached
attention is the same function over keys in a cache. This module has no parameters and does not know layers.

Axes: B batch, T queries, S keys, H heads, D head width, C cache capacity.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Backend = Literal["eager", "sdpa"]


def visible_keys(queries: int, keys: int, key_lens: Tensor | None, *, causal: bool, device: torch.device) -> Tensor:
    """Return a boolean mask of the keys that each query can see, broadcastable to [B, H, T, S].

    key_lens: [B] int32, valid keys of each row, or None for all.
    causal: query t sees keys up to t + (S - T), so that the last query sees every key.
    """
    positions = torch.arange(keys, device=device)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(keys - queries)
    if key_lens is not None:
        mask = mask & (positions < key_lens[:, None])[:, None, None, :]
    return mask


def capped(scores: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(scores / cap), which is below cap (Gemma 2, Gemma Team 2024, section 2); scores if cap is 0."""
    return torch.tanh(scores / cap) * cap if cap else scores


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Return softmax(scale * Q K^T + bias) V over the visible keys (Vaswani et al. 2017, section 3.2.1).

    query:    [B, T, H, D] float
    key:      [B, S, H, D], value likewise
    key_lens: [B] int32 or None; keys beyond a row's length are padding
    bias:     [1 or B, 1 or H, T, S] or None, added before the softmax (T5, ALiBi)
    cap:      limit of the scaled scores, see `capped`; 0: none
    Returns [B, T, H, D]; the result of a query that sees no key is undefined.
    """
    weights = attention_weights(query, key, key_lens, bias, causal=causal, scale=scale, cap=cap)
    value = value.transpose(1, 2)
    return torch.matmul(weights.to(value.dtype), value).transpose(1, 2)


def attention_weights(
    query: Tensor,
    key: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Return the weights [B, H, T, S] of `attention`, softmax(scale * Q K^T + bias); arguments as there."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)  # [B, H, T or S, D]
    scores = capped(torch.matmul(query, key.transpose(2, 3)) * scale, cap)
    if bias is not None:
        scores = scores + bias
    if causal or key_lens is not None:
        mask = visible_keys(query.shape[2], key.shape[2], key_lens, causal=causal, device=query.device)
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1)


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Compute `attention` by PyTorch's own fused kernel, for training; same arguments and result.

    The kernel has no limit of scores: with one, `attention` computes.
    """
    if cap:
        return attention(query, key, value, key_lens, bias, causal=causal, scale=scale, cap=cap)
    mask: Tensor | None = bias
    plain_causal = causal and key_lens is None and bias is None
    if not plain_causal and (causal or key_lens is not None):
        seen = visible_keys(query.shape[1], key.shape[1], key_lens, causal=causal, device=query.device)
        mask = seen if bias is None else bias.masked_fill(~seen, float("-inf"))
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=plain_causal,
        scale=scale,
    )
    return out.transpose(1, 2)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    cache_lens: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append new keys and values to each row's cache, then attend over all cached tokens of the row.

    query, key, value: [B, T, H, D] float, of T new tokens
    cache_key:         [B, H, C, D], cache_value likewise; cache_lens: [B] int32, cached tokens before the append
    bias:              [1 or B, 1 or H, T, C] or None
    New tokens see themselves and the tokens before them.
    Returns ([B, T, H, D], present_key, present_value), new tensors: the cache passed in is unchanged.
    cache_lens + T must not exceed C.
    """
    positions = torch.arange(cache_key.shape[2], device=query.device)
    slots = cache_lens[:, None].long() + torch.arange(key.shape[1], device=query.device)  # [B, T]
    index = slots[:, None, :, None].expand(-1, key.shape[2], -1, key.shape[3])
    cache_key = cache_key.scatter(2, index, key.transpose(1, 2))
    cache_value = cache_value.scatter(2, index, value.transpose(1, 2))
    seen = positions <= slots[:, :, None]  # [B, T, C]
    scores = capped(torch.matmul(query.transpose(1, 2), cache_key.transpose(2, 3)) * scale, cap)
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
    return torch.matmul(weights, cache_value).transpose(1, 2), cache_key, cache_value
