"""From this project's PyTorch operators to nodes of an ONNX graph, one for one.

`torch.onnx.export` takes `TRANSLATIONS` as its custom_translation_table and leaves one node of domain `antiphon`
wherever the model called an operator. Those nodes say what is wanted, not how: a lowering (`contrib_lowering.py`)
replaces them by operators that a runtime has kernels for. Knows nothing of runtimes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnxscript.values import Op, Opset

from antiphon.model.ops import attention_ops  # noqa: F401  registers the operators that the table names

DOMAIN = "antiphon"
ATTENTION = "Attention"
CACHED_ATTENTION = "CachedAttention"

_Parameter = onnx.defs.OpSchema.FormalParameter
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def _schema(name: str, inputs: list[tuple[str, str]], outputs: list[str], attributes: list[Any]) -> Op:
    formal = [
        _Parameter(label.rstrip("?"), kind, param_option=_OPTIONAL) if label.endswith("?") else _Parameter(label, kind)
        for label, kind in inputs
    ]
    schema = onnx.defs.OpSchema(
        name,
        DOMAIN,
        1,
        inputs=formal,
        outputs=[_Parameter(label, "T") for label in outputs],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=attributes,
    )
    return Op(Opset(DOMAIN, 1), name, schema)


_INT = onnx.defs.OpSchema.AttrType.INT
_FLOAT = onnx.defs.OpSchema.AttrType.FLOAT
_LENS = "tensor(int32)"

# [B, T, H, D] operands, as the PyTorch operators.
_attention = _schema(
    ATTENTION,
    [("query", "T"), ("key", "T"), ("value", "T"), ("key_lens?", _LENS), ("bias?", "T")],
    ["output"],
    [
        onnx.defs.OpSchema.Attribute("causal", _INT, "1: bottom-right causal mask", required=True),
        onnx.defs.OpSchema.Attribute("scale", _FLOAT, "factor on query-key products", required=True),
    ],
)
_cached_attention = _schema(
    CACHED_ATTENTION,
    [
        ("query", "T"),
        ("key", "T"),
        ("value", "T"),
        ("cache_key", "T"),
        ("cache_value", "T"),
        ("cache_lens", _LENS),
        ("bias?", "T"),
    ],
    ["output", "present_key", "present_value"],
    [onnx.defs.OpSchema.Attribute("scale", _FLOAT, "factor on query-key products", required=True)],
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
}
