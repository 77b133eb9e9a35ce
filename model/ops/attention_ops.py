"""The two attention operators of this project, registered with PyTorch so that export sees each as one node.

Schemas, shape rules and the eager implementation, which is `model/ops/attention.py` itself. Importing this module
registers `antiphon::attention` and `antiphon::cached_attention`. Both are functional and have no gradient: training
uses another backend. What an operator becomes in ONNX is decided in `onnx_translation.py`.

Axes: B batch, T queries, S keys, N new keys, H heads, D head width, C cache capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.model.ops.attention import attention as eager_attention
from antiphon.model.ops.attention import cached_attention as eager_cached_attention

_ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor? key_lens, Tensor? bias, *, bool causal, float scale) -> Tensor"
)
_CACHED_ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor cache_key, Tensor cache_value, Tensor cache_lens, Tensor? bias, *,"
    " float scale) -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("antiphon::attention", mutates_args=(), schema=_ATTENTION)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention over keys that come with the call; arguments and result as `antiphon.model.ops.attention.attention`.

    query [B, T, H, D]; key, value [B, S, H, D]; key_lens [B] int32 or None; bias [1 or B, 1 or H, T, S] or None.
    Returns [B, T, H, D], contiguous.
    """
    return eager_attention(query, key, value, key_lens, bias, causal=causal, scale=scale).contiguous()


@attention.register_fake
def _attention_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("antiphon::cached_attention", mutates_args=(), schema=_CACHED_ATTENTION)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over each row's cache, new keys appended first; as `antiphon.model.ops.attention.cached_attention`.

    query [B, T, H, D]; key, value [B, N, H, D], N = T or 0; caches [B, H, C, D]; cache_lens [B] int32.
    Returns ([B, T, H, D], present_key, present_value), all contiguous and none aliasing an argument: with N = 0,
    too, the caches come back as copies.
    """
    out, *present = eager_cached_attention(query, key, value, cache_key, cache_value, cache_lens, bias, scale=scale)
    if key.shape[1] == 0:
        present = [cache.clone() for cache in present]
    return out.contiguous(), present[0], present[1]


@cached_attention.register_fake
def _cached_attention_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache_key: Tensor,
    cache_value: Tensor,
    cache_lens: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), torch.empty_like(cache_key), torch.empty_like(cache_value)
