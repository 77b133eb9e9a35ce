"""Attention over padded batches as single operators, which the contrib lowering replaces by those of ONNX Runtime.

The eager implementation is `antiphon.ops.attention` itself. `contrib_lowering` finds the nodes
in the exported graph by their names.

Axes: B batch, T queries, S keys, N new keys, H heads, D head width, C cache capacity.
"""

from __future__ import annotations

from torch import Tensor

from antiphon.ops.attention import attention as eager_attention
from antiphon.ops.attention import cached_attention as eager_cached_attention
from antiphon.ops.operator import Attribute, Input, Operator, Output, register
from antiphon.ops.shared_inputs import SCALE

QUERY = Input("query", "float", "B, T, H, D", "queries")

ATTENTION = Operator(
    name="attention",
    purpose="Attention over keys that are inputs of the call (Vaswani et al. 2017, section 3.2.1).",
    inputs=(
        QUERY,
        Input("key", "float", "B, S, H, D", "keys"),
        Input("value", "float", "B, S, H, D", "values"),
        Input("key_lens", "int32", "B", "valid keys of each row; without it all are valid", optional=True),
        Input("bias", "float", "1 or B, 1 or H, T, S", "added to the scores", optional=True),
    ),
    attributes=(Attribute("causal", bool, "query t sees keys up to t + S - T only"), SCALE),
    outputs=(Output("output", "float", "B, T, H, D", "weighted sums of values"),),
    shapes=lambda inputs: [inputs["query"].shape],
    has_kernel=False,
)

CACHED_ATTENTION = Operator(
    name="cached_attention",
    purpose="Append new keys and values to each row's cache, then attend over all cached tokens of the row.",
    inputs=(
        QUERY,
        Input("key", "float", "B, N, H, D", "new keys, N = T; or N = 0: nothing is appended"),
        Input("value", "float", "B, N, H, D", "new values"),
        Input("cache_key", "float", "B, H, C, D", "cached keys"),
        Input("cache_value", "float", "B, H, C, D", "cached values"),
        Input("cache_lens", "int32", "B", "number of cached tokens of each row before the call"),
        Input("bias", "float", "1 or B, 1 or H, T, C", "added to the scores", optional=True),
    ),
    attributes=(SCALE,),
    outputs=(
        Output("output", "float", "B, T, H, D", "weighted sums of values"),
        Output("present_key", "float", "B, H, C, D", "cached keys after the call"),
        Output("present_value", "float", "B, H, C, D", "cached values after the call"),
    ),
    shapes=lambda inputs: [inputs["query"].shape, inputs["cache_key"].shape, inputs["cache_value"].shape],
    has_kernel=False,
)


@register(ATTENTION)
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
    """Attend, as `antiphon.ops.attention.attention`."""
    return eager_attention(query, key, value, key_lens, bias, causal=causal, scale=scale).contiguous()


@register(CACHED_ATTENTION)
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
    """Append and attend, as `antiphon.ops.attention.cached_attention`; it always copies the caches."""
    out, *present = eager_cached_attention(query, key, value, cache_key, cache_value, cache_lens, bias, scale=scale)
    if key.shape[1] == 0:
        present = [cache.clone() for cache in present]
    return out.contiguous(), present[0], present[1]
