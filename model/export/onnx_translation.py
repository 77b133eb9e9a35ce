"""From this project's PyTorch operators to nodes of an ONNX graph, one for one.

`torch.onnx.export` takes `TRANSLATIONS` as its custom_translation_table and leaves one node of domain `antiphon`
wherever the model called an operator. Those nodes say what is wanted, not how: a lowering (`contrib_lowering.py`)
replaces them by operators that a runtime has kernels for. Operators that have kernels of our own are in
native_translation.py. Knows nothing of runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from antiphon.model.export.native_translation import NATIVE_TRANSLATIONS
from antiphon.model.ops import attention_ops  # noqa: F401  registers the operators that the table names
from antiphon.model.ops.onnx_schema import operator

ATTENTION = "Attention"
CACHED_ATTENTION = "CachedAttention"

# [B, T, H, D] operands, as the PyTorch operators.
_attention = operator(ATTENTION, "query:T key:T value:T key_lens?:ints bias?:T", "output:T", causal=int, scale=float)
_cached_attention = operator(
    CACHED_ATTENTION,
    "query:T key:T value:T cache_key:T cache_value:T cache_lens:ints bias?:T",
    "output:T present_key:T present_value:T",
    scale=float,
)


def _translate_attention(
    query: Any, key: Any, value: Any, key_lens: Any, bias: Any, *, causal: bool, scale: float
) -> Any:
    return _attention(query, key, value, key_lens, bias, causal=int(causal), scale=scale)


def _translate_cached_attention(
    query: Any, key: Any, value: Any, cache_key: Any, cache_value: Any, cache_lens: Any, bias: Any, *, scale: float
) -> Any:
    return _cached_attention(query, key, value, cache_key, cache_value, cache_lens, bias, scale=scale)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.antiphon.attention.default: _translate_attention,
    torch.ops.antiphon.cached_attention.default: _translate_cached_attention,
    **NATIVE_TRANSLATIONS,
}
