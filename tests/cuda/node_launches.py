"""Nodes of nodes.py run on CPU tensors by the interpreter: the launches that the native library makes for each.

Outputs are allocated full of NaN, so that a value that no kernel writes is noticed. Arguments are the node's inputs by
name, None where an optional one is absent, and its attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from antiphon.ops.cuda.kernel_list import HEAD_WIDTHS, VOCABULARY_PART
from antiphon.ops.cuda.nodes import ACTIVATIONS
from tests.cuda.interpreter import Grid, Order, in_order, launch

INT_POISON = -(2**31) + 7


def embed(
    tokens: Tensor,
    positions: Tensor,
    weight: Tensor,
    position_table: Tensor | None = None,
    rows: Tensor | None = None,
    previous: Tensor | None = None,
    types: Tensor | None = None,
    type_table: Tensor | None = None,
    *,
    scale: float,
    order: Order = in_order,
) -> Tensor:
    width = weight.shape[1]
    out = poisoned((len(tokens), width), weight.dtype)
    flags = flags_of(position_table, previous, types)
    tensors = (out, tokens, positions, weight, position_table, rows, previous, types, type_table)
    _launch("embed", weight.dtype, (len(tokens), 1, 1), tensors, (width, scale, flags), order)
    return out


def add_norm(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    epsilon: float,
    kind: str,
    order: Order = in_order,
) -> tuple[Tensor, Tensor]:
    normed, total = poisoned(x.shape, x.dtype), poisoned(x.shape, x.dtype)
    flags = flags_of(bias, residual, weight, norm_bias, kind == "rms")
    tensors = (normed, total, x, bias, residual, weight, norm_bias)
    _launch("add_norm", x.dtype, (len(x), 1, 1), tensors, (x.shape[1], epsilon, flags), order)
    return normed, total


def activate(x: Tensor, bias: Tensor | None = None, *, activation: str, gated: bool, order: Order = in_order) -> Tensor:
    width = x.shape[1] // (2 if gated else 1)
    out = poisoned((len(x), width), x.dtype)
    numbers = (width, ACTIVATIONS.index(activation), flags_of(bias, gated))
    _launch("activate", x.dtype, (len(x), -(-width // 1024), 1), (out, x, bias), numbers, order)
    return out


def rotary(
    qkv: Tensor, bias: Tensor | None, positions: Tensor, table: Tensor, *, num_heads: int, order: Order = in_order
) -> Tensor:
    out = poisoned(qkv.shape, qkv.dtype)
    numbers = (num_heads, table.shape[1], flags_of(bias))
    _launch("rotary", qkv.dtype, (len(qkv), 3 * num_heads, 1), (out, qkv, bias, positions, table), numbers, order)
    return out


def packed_attention(
    qkv: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    tiles: Tensor,
    bias_table: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
    order: Order = in_order,
) -> Tensor:
    width = qkv.shape[1] // (3 * num_heads)
    out = poisoned((len(qkv), num_heads * width), qkv.dtype)
    numbers = (num_heads, width, reach_of(bias_table), scale, flags_of(bias, bias_table, slopes, causal))
    tensors = (out, qkv, bias, offsets, tiles, bias_table, slopes)
    _launch("packed_attention", qkv.dtype, (len(tiles), num_heads, 1), tensors, numbers, order, width)
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
    order: Order = in_order,
) -> Tensor:
    width = cache.shape[5]
    written = torch.full((1,), INT_POISON, dtype=torch.int32)
    parts = kv.shape[1] // (num_heads * width)
    numbers = (parts, tables.shape[1], num_heads, width, cache.shape[1], layer, flags_of(bias))
    tensors = (written, cache, kv, bias, tables, rows, positions)
    _launch("paged_write", kv.dtype, (len(kv), num_heads, 1), tensors, numbers, order)
    return written


def paged_attention(
    query: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    tables: Tensor,
    rows: Tensor,
    lengths: Tensor,
    written: Tensor | None = None,
    bias_table: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
    num_splits: int = 1,
    order: Order = in_order,
) -> Tensor:
    del written  # an order of nodes only
    width, num_tokens = cache.shape[5], len(query)
    out = poisoned((num_tokens, num_heads * width), query.dtype)
    sums = poisoned((num_tokens, num_heads, num_splits, width + 2), torch.float32)
    numbers = (
        tables.shape[1], query.shape[1], num_heads, width, cache.shape[1], layer, reach_of(bias_table), num_splits,
        scale, flags_of(bias, bias_table, slopes),
    )  # fmt: skip
    tensors = (out, sums, query, bias, cache, tables, rows, lengths, bias_table, slopes)
    grid = (num_tokens, num_heads, num_splits)
    _launch("paged_attention", query.dtype, grid, tensors, numbers, order, width)
    if num_splits > 1:
        grid = (num_tokens, num_heads, 1)
        _launch("merge_splits", query.dtype, grid, (out, sums), (num_heads, width, num_splits), order, width)
    return out


def pick(hidden: Tensor, picks: Tensor, *, order: Order = in_order) -> Tensor:
    out = poisoned((len(picks), hidden.shape[1]), hidden.dtype)
    _launch("pick", hidden.dtype, (len(picks), 1, 1), (out, hidden, picks), (hidden.shape[1],), order)
    return out


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
    *,
    order: Order = in_order,
) -> tuple[Tensor, ...]:
    (count, vocab_size), wanted = logits.shape, len(candidates)
    num_parts, flags = -(-vocab_size // VOCABULARY_PART), flags_of(bias)
    values, parts = poisoned(logits.shape, torch.float32), poisoned((count, num_parts, 3), torch.float32)
    reduced = (parts, values, logits, bias, float_params, int_params, edit_offsets)
    _launch("vocabulary", logits.dtype, (count, num_parts, 1), reduced, (vocab_size, flags), order)
    outputs = (
        torch.full((count,), INT_POISON, dtype=torch.int32),
        poisoned((count,), torch.float32),
        torch.full((count, wanted), INT_POISON, dtype=torch.int32),
        poisoned((count, wanted), torch.float32),
        poisoned((count, wanted), torch.float32),
    )
    params = (float_params, int_params, edit_offsets, edit_ids, edit_rounds, edit_values)
    numbers = (vocab_size, num_parts, wanted, flags)
    tensors = (*outputs, values, parts, logits, bias, positions, *params)
    _launch("sample", logits.dtype, (count, 1, 1), tensors, numbers, order)
    return outputs


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor full of NaN."""
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def flags_of(*given: Tensor | bool | None) -> int:
    """Return the bits of what is present: 1 for the first, 2 for the second, and so on."""
    return sum(1 << index for index, one in enumerate(given) if one is not None and one is not False)


def reach_of(bias_table: Tensor | None) -> int:
    """Return the largest distance of a bias table [H, 2 * reach + 1]."""
    return 0 if bias_table is None else bias_table.shape[1] // 2


def _launch(
    kernel: str,
    dtype: torch.dtype,
    grid: Grid,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    order: Order,
    head_width: int | None = None,
) -> None:
    name = f"{kernel}.{str(dtype).removeprefix('torch.')}"
    if head_width is not None:
        name += f".{next(width for width in HEAD_WIDTHS if width >= head_width)}"
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous()
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    launch(name, grid, [*addresses, *numbers], order)
