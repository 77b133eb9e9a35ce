"""Nodes of nodes.py run on CPU tensors by the interpreter: the launches that the native library makes for each.

Outputs are allocated full of NaN, so that a value that no kernel writes is noticed. Arguments are the node's inputs by
name, None where an optional one is absent, and its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from antiphon.ops.cuda.nodes import ACTIVATIONS, BLOCK, HEAD_WIDTHS, NODES, VOCABULARY_PART, Kernel
from tests.cuda.interpreter import Grid, Order, in_order, launch

INT_POISON = -(2**31) + 7
_KERNELS = {kernel.name: (node, kernel) for node in NODES for kernel in node.kernels}


def embed(*, order: Order = in_order, **given: Any) -> Tensor:
    count, (_, width), dtype = len(given["tokens"]), given["weight"].shape, given["weight"].dtype
    out = poisoned((count, width), dtype)
    _launch("embed", dtype, (count, 1, 1), given | {"out": out, "width": width}, order)
    return out


def add_norm(*, order: Order = in_order, **given: Any) -> tuple[Tensor, Tensor]:
    x = given["x"]
    normed, total = poisoned(x.shape, x.dtype), poisoned(x.shape, x.dtype)
    values = given | {"normed": normed, "total": total, "width": x.shape[1]}
    _launch("add_norm", x.dtype, (len(x), 1, 1), values, order)
    return normed, total


def activate(*, order: Order = in_order, **given: Any) -> Tensor:
    x = given["x"]
    width = x.shape[1] // (2 if given["gated"] else 1)
    out = poisoned((len(x), width), x.dtype)
    values = given | {"out": out, "width": width, "activation": ACTIVATIONS.index(given["activation"])}
    _launch("activate", x.dtype, (len(x), -(-width // BLOCK), 1), values, order)
    return out


def rotary(*, order: Order = in_order, **given: Any) -> Tensor:
    qkv = given["qkv"]
    out = poisoned(qkv.shape, qkv.dtype)
    values = given | {"out": out, "width": given["table"].shape[1]}
    _launch("rotary", qkv.dtype, (len(qkv), 3 * given["num_heads"], 1), values, order)
    return out


def packed_attention(*, order: Order = in_order, **given: Any) -> Tensor:
    qkv, heads = given["qkv"], given["num_heads"]
    width = qkv.shape[1] // (3 * heads)
    out = poisoned((len(qkv), heads * width), qkv.dtype)
    values = given | {"out": out, "width": width, "reach": reach_of(given["bias_table"])}
    _launch("packed_attention", qkv.dtype, (len(given["tiles"]), heads, 1), values, order, width)
    return out


def paged_write(*, order: Order = in_order, **given: Any) -> Tensor:
    kv, heads = given["kv"], given["num_heads"]
    written = torch.full((1,), INT_POISON, dtype=torch.int32)
    sizes = cache_sizes(given)
    values = given | sizes | {"written": written, "parts": kv.shape[1] // (heads * sizes["width"])}
    _launch("paged_write", kv.dtype, (len(kv), heads, 1), values, order)
    return written


def paged_attention(*, num_splits: int = 1, order: Order = in_order, **given: Any) -> Tensor:
    query, heads, sizes = given["query"], given["num_heads"], cache_sizes(given)
    num_tokens, width = len(query), sizes["width"]
    out = poisoned((num_tokens, heads * width), query.dtype)
    sums = poisoned((num_tokens, heads, num_splits, width + 2), torch.float32)
    values = given | sizes | {"out": out, "sums": sums, "num_splits": num_splits}
    values |= {"query_stride": query.shape[1], "reach": reach_of(given["bias_table"])}
    _launch("paged_attention", query.dtype, (num_tokens, heads, num_splits), values, order, width)
    if num_splits > 1:
        _launch("merge_splits", query.dtype, (num_tokens, heads, 1), values, order, width)
    return out


def ssru(*, order: Order = in_order, **given: Any) -> Tensor:
    gates = given["gates"]
    return _recurrence("ssru", len(gates), gates.shape[1] // 2, given, order)


def paged_average(*, order: Order = in_order, **given: Any) -> Tensor:
    count, width = given["x"].shape
    return _recurrence("paged_average", count, width, given, order)


def _recurrence(name: str, count: int, width: int, given: Mapping[str, Any], order: Order) -> Tensor:
    cache, dtype = given["cache"], given["cache"].dtype
    out = poisoned((count, width), dtype)
    sizes = cache_sizes(given) | {"width": width, "part": cache[0, 0].numel()}
    _launch(name, dtype, (count, -(-width // BLOCK), 1), {**given, **sizes, "out": out}, order)
    return out


def gated_sum(*, order: Order = in_order, **given: Any) -> Tensor:
    x = given["x"]
    out = poisoned(x.shape, x.dtype)
    values = given | {"out": out, "width": x.shape[1]}
    _launch("gated_sum", x.dtype, (len(x), -(-x.shape[1] // BLOCK), 1), values, order)
    return out


def pick(*, order: Order = in_order, **given: Any) -> Tensor:
    hidden, picks = given["hidden"], given["picks"]
    out = poisoned((len(picks), hidden.shape[1]), hidden.dtype)
    _launch("pick", hidden.dtype, (len(picks), 1, 1), given | {"out": out, "width": hidden.shape[1]}, order)
    return out


def sample(*, order: Order = in_order, **given: Any) -> tuple[Tensor, ...]:
    logits, (count, vocab_size), wanted = given["logits"], given["logits"].shape, len(given["candidates"])
    num_parts = -(-vocab_size // VOCABULARY_PART)
    outputs = {
        "token_ids": torch.full((count,), INT_POISON, dtype=torch.int32),
        "logprobs": poisoned((count,), torch.float32),
        "top_ids": torch.full((count, wanted), INT_POISON, dtype=torch.int32),
        "top_logprobs": poisoned((count, wanted), torch.float32),
        "top_scores": poisoned((count, wanted), torch.float32),
    }
    workspace = {
        "values": poisoned(logits.shape, torch.float32),
        "parts": poisoned((count, num_parts, 3), torch.float32),
    }
    sizes = {"vocab_size": vocab_size, "num_parts": num_parts, "num_candidates": wanted}
    values = given | outputs | workspace | sizes
    _launch("vocabulary", logits.dtype, (count, num_parts, 1), values, order)
    _launch("sample", logits.dtype, (count, 1, 1), values, order)
    return tuple(outputs.values())


LAUNCHES: dict[str, Callable[..., Any]] = {
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


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor full of NaN."""
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def cache_sizes(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers that describe the cache and its tables."""
    cache = given["cache"]
    return {"table_width": given["tables"].shape[1], "num_layers": cache.shape[1], "width": cache.shape[5]}


def reach_of(bias_table: Tensor | None) -> int:
    """Return the largest distance of a bias table [H, 2 * reach + 1]."""
    return 0 if bias_table is None else bias_table.shape[1] // 2


def flags_of(kernel: Kernel, values: Mapping[str, Any]) -> int:
    """Return the bits of the flags that are set."""
    return sum(1 << index for index, flag in enumerate(kernel.flags) if _is_set(flag, values))


def _is_set(flag: str, values: Mapping[str, Any]) -> bool:
    name, is_compared, value = flag.partition("=")
    if is_compared:
        return bool(values[name] == value)
    return all(values.get(part) is not None and values[part] is not False for part in flag.split("&"))


def _launch(
    name: str,
    dtype: torch.dtype,
    grid: Grid,
    values: Mapping[str, Any],
    order: Order,
    head_width: int | None = None,
) -> None:
    """Launch a kernel with values by the names of its parameters."""
    node, kernel = _KERNELS[name]
    variant = f"{name}.{str(dtype).removeprefix('torch.')}"
    if head_width is not None:
        variant += f".{next(width for width in HEAD_WIDTHS if width >= head_width)}"
    arguments = []
    for parameter in node.parameters(kernel):
        value = flags_of(kernel, values) if parameter.name == "flags" else values.get(parameter.name)
        if isinstance(value, Tensor):
            assert value.is_contiguous()
            value = value.data_ptr()
        arguments.append(0 if value is None else value)
    launch(variant, grid, arguments, order)
