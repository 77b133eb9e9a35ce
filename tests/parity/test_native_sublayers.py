"""Operators for whole sublayers give the bits of separate products, attention and norm, at every precision.

The attention and the gate between the products are those of a float32 sublayer with identities as products. All are
compared with their eager references in test_native_ops.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from antiphon.ops.cache_geometry import BLOCK_SIZE, padded_width
from antiphon.ops.operator import NODE_PREFIXES
from antiphon.ops.operators.attention import read_positions
from antiphon.ops.operators.recurrence import ssru
from tests.operators import SUBLAYERS, Array, Arrays, normal, ramp, random_call
from tests.parity.native_nodes import attend, gate, run_node

PRECISIONS = [*NODE_PREFIXES]
NUM_CALLS = 25


def separately(arrays: Arrays, attributes: dict[str, Any], precision: str) -> list[Array]:
    """Run a sublayer's call with one operator after another; returns the norm and the sum."""
    arrays = dict(arrays)
    x, residual = arrays.pop("x"), arrays.pop("residual")
    norm = {"weight": arrays.pop("norm_weight"), "bias": arrays.pop("norm_bias")}
    kind = {name: attributes.pop(name) for name in ("epsilon", "kind")}
    if "gates_weight" in arrays:
        out = _recurrence(x, arrays, attributes, precision)
    elif "inner_width" in attributes:
        states = _inner(x, arrays, attributes, precision)
        out = _product(states, arrays, "outer_", x, precision)
    else:
        out = _product(_attended(x, arrays, attributes, precision), arrays, "out_", x, precision)
    return run_node("AddNorm", {"x": out, "residual": residual, **norm}, **kind)


def _product(x: Array | None, arrays: Arrays, prefix: str, like: Array | None, precision: str, **wanted: Any) -> Array:
    """Run one product; its width is that of `like` unless given."""
    assert like is not None
    parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    attributes = {"width": like.shape[1], "activation": "none", **wanted}
    (out,) = run_node(f"{NODE_PREFIXES[precision]}Linear", {"x": x, **parts}, **attributes)
    return out


def _inner(x: Array | None, arrays: Arrays, attributes: dict[str, Any], precision: str) -> Array:
    activation, gated = attributes["activation"], attributes["gated"]
    first = "none" if gated else activation
    states = _product(x, arrays, "inner_", x, precision, width=attributes["inner_width"], activation=first)
    return gate(states, activation) if gated else states


def _recurrence(x: Array | None, arrays: Arrays, attributes: dict[str, Any], precision: str) -> Array:
    assert x is not None
    gates = _product(x, arrays, "gates_", x, precision, width=2 * x.shape[1])
    rows = [arrays[name] for name in ("cache", "block_tables", "offsets", "positions")]
    out, _ = ssru(
        torch.from_numpy(gates), *(torch.from_numpy(array) for array in rows if array is not None), **attributes
    )
    return out.numpy()


def _attended(x: Array | None, arrays: Arrays, attributes: dict[str, Any], precision: str) -> Array:
    (size,) = (name for name in attributes if name.endswith("_width"))
    projected, width = size.removesuffix("width"), attributes.pop(size)
    states = _product(x, arrays, projected, x, precision, width=width)
    others = {name: array for name, array in arrays.items() if not name.startswith((projected, "out_"))}
    name = {"qkv_": "PagedSelf", "query_": "PagedCross"}[projected] if "cache" in others else "Packed"
    return attend(f"{name}AttentionSublayer", {projected.removesuffix("_"): states, **others}, **attributes)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SUBLAYERS)
def test_sublayer_equals_separate_operators(name: str, precision: str) -> None:
    random = np.random.default_rng(3)
    node = NODE_PREFIXES[precision] + name
    for _ in range(NUM_CALLS):
        arrays, attributes = random_call(node, random)
        cache = arrays.get("cache")
        before = None if cache is None else cache.copy()
        found = run_node(node, arrays, threads=int(random.integers(1, 3)), **attributes)
        expected = separately({**arrays, **({} if before is None else {"cache": before})}, attributes, precision)
        if name == "SsruSublayer":  # no other operator has the recurrence, whose reference is PyTorch
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
            continue
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        if cache is not None:
            np.testing.assert_array_equal(cache, before)


def rotated(qkv: Array, positions: Array, table: Array, heads: int) -> Array:
    """Return qkv with rotated queries and keys: as keys they are written to a cache, a row for each token."""
    queries, keys, values = np.split(qkv, 3, axis=1)
    return np.hstack([_cached(queries, positions, table, heads), _cached(keys, positions, table, heads), values])


def _cached(keys: Array, positions: Array, table: Array, heads: int) -> Array:
    """Return the keys [N, H D] that the decoder caches at these positions."""
    width, num_tokens = keys.shape[1] // heads, len(keys)
    cache = np.zeros((num_tokens + 1, 1, 2, heads, BLOCK_SIZE * padded_width(width)), np.float32)
    tables = np.zeros((num_tokens, int(positions.max()) // BLOCK_SIZE + 1), np.int32)
    tables[np.arange(num_tokens), positions // BLOCK_SIZE] = np.arange(1, num_tokens + 1)
    arrays = {
        "qkv": np.hstack([keys] * 3), "cache": cache, "block_tables": tables, "offsets": ramp([1] * num_tokens),
        "positions": positions, "bias_table": None, "slopes": None, "rotary_table": table,
    }  # fmt: skip
    attend("PagedSelfAttentionSublayer", arrays, num_heads=heads, scale=1.0, layer=0)
    pool = torch.from_numpy(cache)
    found = [
        read_positions(pool, 0, row, int(position) + 1, (heads, width))[0][-1].flatten()
        for row, position in zip(tables.tolist(), positions, strict=True)
    ]
    return torch.stack(found).numpy()


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (2, 8), (3, 24), (1, 70), (2, 128)])
def test_packed_attention_rotates_as_the_decoder_does(heads: int, width: int) -> None:
    lens, table = [3, 60, 1], normal(70, width)
    qkv, positions = normal(sum(lens), 3 * heads * width), np.concatenate([np.arange(n, dtype=np.int32) for n in lens])
    attributes: dict[str, Any] = dict(num_heads=heads, scale=0.4, causal=0)
    arrays = {"offsets": ramp(lens), "bias_table": None, "slopes": None}
    found = attend(
        "PackedAttentionSublayer",
        {"qkv": qkv, **arrays, "positions": positions, "rotary_table": table},
        threads=2, **attributes,
    )  # fmt: skip
    expected = attend("PackedAttentionSublayer", {"qkv": rotated(qkv, positions, table, heads), **arrays}, **attributes)
    np.testing.assert_array_equal(found, expected)
