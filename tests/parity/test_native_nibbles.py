"""4-bit weights: their quantisation, and the operator that reads them, compared with integer arithmetic.

test_native_refusals.py runs these tests again with the kernels of every other processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.export.quantize import GROUP, quantize_groups
from antiphon.export.weights import pack_int4, pack_int8, unpack_int4
from tests.parity.native_nodes import run_node

Floats = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def arrays_of(x: Floats, weight: Floats, bias: Floats | None = None) -> dict[str, NDArray[Any] | None]:
    held = pack_int4(weight)
    return {
        "x": x, "weight": held.nibbles, "ratios": held.ratios, "scales": held.scales, "offsets": held.offsets,
        "bias": bias,
    }  # fmt: skip


def expected_of(x: Floats, weight: Floats) -> NDArray[np.float64]:
    """Return the product of rows in 8 bits, each with its own scale, and the dequantised 4-bit weights."""
    levels = np.where((x >= 0).all(axis=1, keepdims=True), 255, 127)
    step = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / levels
    rows = np.rint(np.divide(x, step, out=np.zeros(x.shape), where=step > 0))
    product: NDArray[np.float64] = (rows * step) @ quantize_groups(weight).weight().T.astype(np.float64)
    return product


def check(rows: int, inputs: int, outputs: int, *, positive: bool) -> None:
    x = normal(rows, inputs) * np.geomspace(1e-3, 1e2, rows, dtype=np.float32)[:, None]
    x, weight = np.abs(x) if positive else x, normal(outputs, inputs, seed=1)
    (found,) = run_node("NibbleLinear", arrays_of(x, weight), width=outputs, activation="none")
    expected = expected_of(x, weight)
    # Groups are added in float32, and an activation between two levels can be rounded either way.
    size = np.abs(x).max(axis=1, keepdims=True) * inputs**0.5
    assert (np.abs(found - expected) <= 0.05 * size).all()
    assert (np.abs(found - expected) <= 1e-5 * size).mean() > 0.9


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 100), st.booleans())
def test_nibble_linear_equals_integer_arithmetic(rows: int, inputs: int, outputs: int, positive: bool) -> None:
    check(rows, inputs, outputs, positive=positive)


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200])
def test_rows_are_bit_identical_alone_in_a_batch_and_on_two_threads(rows: int) -> None:
    x, weight = normal(rows, 320), normal(1500, 320, seed=1)
    arrays = arrays_of(x, weight)
    attributes: dict[str, Any] = dict(width=1500, activation="relu")
    (found,) = run_node("NibbleLinear", arrays, **attributes)
    (parallel,) = run_node("NibbleLinear", arrays, threads=2, **attributes)
    np.testing.assert_array_equal(parallel, found)
    for row in {0, rows // 2, rows - 1}:
        (alone,) = run_node("NibbleLinear", {**arrays, "x": x[[row]]}, threads=2, **attributes)
        np.testing.assert_array_equal(alone, found[[row]])


def test_nibble_linear_of_a_row_of_zeros_is_its_bias() -> None:
    x, bias = np.zeros((3, 70), np.float32), normal(24)
    x[1] = 1
    (found,) = run_node("NibbleLinear", arrays_of(x, normal(24, 70), bias), width=24, activation="none")
    np.testing.assert_array_equal(found[[0, 2]], np.stack([bias, bias]))


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
