"""The operators of the native lowering as ONNX nodes: their schemas, and how PyTorch's calls become them.

A node keeps the name, operands and attributes of the call. Four things differ. Weights are as PyTorch holds them,
[outputs, inputs], until packing.py lays them out for the kernels and adds the attribute that says how many outputs the
padding hides. Operators that return a changed cache change it in place: their nodes have no such output, and what
reads it reads the graph's own cache, one layer never another's. `causal` is an int, and Select's bias comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from antiphon.model.ops import native_attention, native_linear, native_select  # noqa: F401  registers the operators
from antiphon.model.ops.choices import PER_CHOICE
from antiphon.model.ops.onnx_schema import operator

_embed = operator("Embed", "input_ids:ids positions:ints weight:T position_table?:T", "out:T", scale=float)
_linear = operator("Linear", "x:T weight:T bias?:T", "out:T", activation=str)
_gate = operator("Gate", "x:T", "out:T", activation=str)
_add_norm = operator("AddNorm", "x:T residual?:T weight?:T bias?:T", "normed:T sum:T", epsilon=float, kind=str)
_rotary = operator("Rotary", "qkv:T positions:ints table:T", "out:T", num_heads=int)
_packed_attention = operator(
    "PackedAttention", "qkv:T offsets:ints bias_table?:T slopes?:T", "out:T", num_heads=int, scale=float, causal=int
)
_disentangled_attention = operator(
    "DisentangledAttention",
    "qkv:T offsets:ints position_rows:ints position_keys?:T position_queries?:T",
    "out:T",
    num_heads=int,
    scale=float,
)
_paged_self_attention = operator(
    "PagedSelfAttention",
    "qkv:T cache:C block_tables:ints offsets:ints positions:ints bias_table?:T slopes?:T",
    "out:T",
    num_heads=int,
    scale=float,
    layer=int,
)
_paged_cross_attention = operator(
    "PagedCrossAttention",
    "query:T cache:C block_tables:ints offsets:ints source_lens:ints",
    "out:T",
    num_heads=int,
    scale=float,
    layer=int,
)
_paged_write = operator(
    "PagedWrite",
    "kv:T cache:C block_tables:ints offsets:ints after?:ints",
    "written:ints",
    num_heads=int,
    layer=int,
)
_TYPES_OF_CHOICES = {np.float32: "T", np.int32: "ints", np.int64: "ids", np.uint64: "ids"}
_PER_CHOICE = " ".join(f"{name}:{_TYPES_OF_CHOICES[dtype]}" for name, (dtype, _) in PER_CHOICE.items())
_select = operator(
    "Select",
    f"hidden:T weight:T positions:ints {_PER_CHOICE} edit_offsets:ints edit_ids:ints edit_values:T bias?:T",
    "token_ids:ids logprobs:T top_ids:ids top_logprobs:T top_scores:T",
)


def _translate_packed_attention(qkv: Any, offsets: Any, bias_table: Any, slopes: Any, **attributes: Any) -> Any:
    causal = int(attributes.pop("causal"))
    return _packed_attention(qkv, offsets, bias_table, slopes, causal=causal, **attributes)


def _translate_paged_self_attention(qkv: Any, cache: Any, *operands: Any, **attributes: Any) -> Any:
    return _paged_self_attention(qkv, cache, *operands, **attributes), cache


def _translate_paged_write(kv: Any, cache: Any, *operands: Any, **attributes: Any) -> Any:
    return _paged_write(kv, cache, *operands, **attributes), cache


def _translate_select(hidden: Any, weight: Any, bias: Any, positions: Any, *settings: Any) -> Any:
    optional = () if bias is None else (bias,)
    return _select(hidden, weight, positions, *settings, *optional)


NATIVE_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.antiphon.embed.default: _embed,
    torch.ops.antiphon.linear.default: _linear,
    torch.ops.antiphon.gate.default: _gate,
    torch.ops.antiphon.add_norm.default: _add_norm,
    torch.ops.antiphon.rotary.default: _rotary,
    torch.ops.antiphon.packed_attention.default: _translate_packed_attention,
    torch.ops.antiphon.disentangled_attention.default: _disentangled_attention,
    torch.ops.antiphon.paged_self_attention.default: _translate_paged_self_attention,
    torch.ops.antiphon.paged_cross_attention.default: _paged_cross_attention,
    torch.ops.antiphon.paged_write.default: _translate_paged_write,
    torch.ops.antiphon.select.default: _translate_select,
}
