"""4-bit weights: their quantisation, and the operator that reads them, compared with integer arithmetic.

test_native_refusals.py runs these tests again with the kernels of every other processor.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.export.quantize import GROUP, quantize_groups
from antiphon.export.weights import pack_int4, pack_int8, unpack_int4
from tests.operators import Floats, normal, packed_weight
from tests.parity.native_nodes import run_node


def expected_of(x: Floats, weight: Floats) -> NDArray[np.float64]:
    """Return the product of rows in 8 bits, each with its own scale, and the dequantised 4-bit weights."""
    levels = np.where((x >= 0).all(axis=1, keepdims=True), 255, 127)
    step = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / levels
    rows = np.rint(np.divide(x, step, out=np.zeros(x.shape), where=step > 0))
    product: NDArray[np.float64] = (rows * step) @ quantize_groups(weight).weight().T.astype(np.float64)
    return product


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 100), st.booleans())
def test_nibble_linear_equals_integer_arithmetic(rows: int, inputs: int, outputs: int, positive: bool) -> None:
    x = normal(rows, inputs) * np.geomspace(1e-3, 1e2, rows, dtype=np.float32)[:, None]
    x, weight = np.abs(x) if positive else x, normal(outputs, inputs, seed=1)
    (found,) = run_node("NibbleLinear", {"x": x, **packed_weight(weight, "int4")}, width=outputs, activation="none")
    expected = expected_of(x, weight)
    # Groups are added in float32, and an activation between two levels can be rounded either way.
    size = np.abs(x).max(axis=1, keepdims=True) * inputs**0.5
    assert (np.abs(found - expected) <= 0.05 * size).all()
    assert (np.abs(found - expected) <= 1e-5 * size).mean() > 0.9


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (20, 100), (1, 1), (1030, 33)])
def test_packed_integers_are_equal_after_unpacking(outputs: int, inputs: int) -> None:
    weight = normal(outputs, inputs)
    groups = quantize_groups(weight)
    assert (unpack_int4(pack_int4(weight).nibbles, outputs, inputs) == groups.integers).all()
    assert groups.integers.min() >= -8
    assert groups.integers.max() <= 7


def test_weights_are_within_half_a_step_and_extremes_are_clipped_slightly() -> None:
    weight = normal(64, 256)
    weight[3], weight[5, :GROUP] = 0, 0
    groups = quantize_groups(weight)
    steps = np.abs(groups.ratios.astype(np.float32) * groups.scales[:, None]).repeat(GROUP, axis=1)
    error = np.abs(groups.weight() - weight)
    assert (error <= 3 * steps + 1e-7).all()
    assert (error <= 0.501 * steps + 1e-7).mean() > 0.97
    assert 0.07 < np.sqrt((error**2).mean() / (weight**2).mean()) < 0.09
    assert (groups.weight()[3] == 0).all()


def test_packed_int8_weights_have_more_bytes_than_int4() -> None:
    weight = normal(512, 512)
    held = pack_int4(weight)
    assert (held.nibbles.nbytes + held.ratios.nbytes) * 8 / weight.size == 4.5
    assert pack_int8(weight).integers.nbytes * 8 / weight.size == 8
