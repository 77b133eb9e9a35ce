"""Operators for whole sublayers give the bits of the separate operators, whatever the precision and the threads.

The separate operators are compared with their eager references in test_native_ops.py and test_native_nibbles.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.ops.operator import NODE_PREFIXES
from tests.parity.native_calls import CALLS, Arrays
from tests.parity.native_nodes import run_node

PRECISIONS = [*NODE_PREFIXES]
NUM_CALLS = 25

Array = NDArray[Any]


def separately(arrays: Arrays, attributes: dict[str, Any], precision: str) -> list[Array]:
    """Run a sublayer's call with one operator after another; returns the norm and the sum."""
    arrays = dict(arrays)
    x, residual = arrays.pop("x"), arrays.pop("residual")
    norm = {"weight": arrays.pop("norm_weight"), "bias": arrays.pop("norm_bias")}
    kind = {name: attributes.pop(name) for name in ("epsilon", "kind")}
    if "inner_width" in attributes:
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
    return run_node("Gate", {"x": states}, activation=activation)[0] if gated else states


def _attended(x: Array | None, arrays: Arrays, attributes: dict[str, Any], precision: str) -> Array:
    (size,) = (name for name in attributes if name.endswith("_width"))
    projected, width = size.removesuffix("width"), attributes.pop(size)
    states = _product(x, arrays, projected, x, precision, width=width)
    others = {name: array for name, array in arrays.items() if not name.startswith((projected, "out_"))}
    table = others.pop("rotary_table", None)
    if table is not None:
        rotated = {"qkv": states, "positions": others["positions"], "table": table}
        (states,) = run_node("Rotary", rotated, num_heads=attributes["num_heads"])
    attention = "PackedAttention" if "causal" in attributes else f"Paged{_kind(projected)}Attention"
    (attended,) = run_node(attention, {projected.removesuffix("_"): states, **others}, **attributes)
    return attended


def _kind(projected: str) -> str:
    return "Cross" if projected == "query_" else "Self"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name",
    ["FeedForwardSublayer", "PackedAttentionSublayer", "PagedSelfAttentionSublayer", "PagedCrossAttentionSublayer"],
)
def test_sublayer_equals_separate_operators(name: str, precision: str) -> None:
    random = np.random.default_rng(3)
    node = NODE_PREFIXES[precision] + name
    for _ in range(NUM_CALLS):
        arrays, attributes = CALLS[node](random)
        cache = arrays.get("cache")
        before = None if cache is None else cache.copy()
        found = run_node(node, arrays, threads=int(random.integers(1, 3)), **attributes)
        expected = separately({**arrays, **({} if before is None else {"cache": before})}, attributes, precision)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        if cache is not None:
            np.testing.assert_array_equal(cache, before)
