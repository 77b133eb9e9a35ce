"""Packed weights of the native operators: packing and unpacking, padding, and one copy of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.export.quantize import quantize_groups, quantize_rows
from antiphon.export.weights import (
    DEPTH,
    PANEL,
    pack_float,
    pack_int4,
    pack_int8,
    unpack_float,
    unpack_int8,
    unpack_weight,
)

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 150))


def matrix(sizes: tuple[int, int]) -> NDArray[np.float32]:
    return np.random.default_rng(sum(sizes)).standard_normal(sizes, np.float32)


@given(SIZES)
def test_float_weights_are_equal_after_unpacking(sizes: tuple[int, int]) -> None:
    weight = matrix(sizes)
    packed = pack_float(weight)
    assert packed.shape == (-(-sizes[0] // PANEL), sizes[1], PANEL)
    np.testing.assert_array_equal(unpack_float(packed, sizes[0]), weight)
    np.testing.assert_array_equal(unpack_float(packed, len(packed) * PANEL)[sizes[0] :], 0)


@given(SIZES)
def test_int8_weights_are_equal_after_unpacking(sizes: tuple[int, int]) -> None:
    outputs, inputs = sizes
    integers, scales = quantize_rows(matrix(sizes))
    packed = pack_int8(matrix(sizes))
    assert packed.integers.shape == (-(-outputs // PANEL), -(-inputs // DEPTH) * DEPTH // 4, PANEL, 4)
    np.testing.assert_array_equal(unpack_int8(packed.integers, outputs, inputs), integers)
    np.testing.assert_array_equal(packed.scales[:outputs], scales)
    np.testing.assert_array_equal(packed.column_sums[:outputs], integers.sum(axis=1, dtype=np.int32))
    whole = unpack_int8(packed.integers, len(packed.integers) * PANEL, packed.integers.shape[1] * 4)
    assert not whole[outputs:].any()
    assert not whole[:, inputs:].any()
    assert not packed.column_sums[outputs:].any()


@given(SIZES)
def test_unpacked_weight_equals_the_dequantised_weight(sizes: tuple[int, int]) -> None:
    """Sizes are mostly no multiples of panel, depth and group, so that padding must be dropped."""
    weight = matrix(sizes) * np.float32(0.37)
    integers, scales = quantize_rows(weight)
    eight, four = pack_int8(weight), pack_int4(weight)
    parts: dict[Precision, tuple[list[NDArray[Any]], NDArray[np.float32]]] = {
        "float32": ([pack_float(weight)], weight),
        "int8": ([eight.integers, eight.scales, eight.column_sums], integers * scales[:, None]),
        "int4": ([four.nibbles, four.ratios, four.scales, four.offsets], quantize_groups(weight).weight()),
    }
    for precision, (packed, expected) in parts.items():
        unpacked = unpack_weight(packed, precision, *sizes)
        assert unpacked.dtype == np.float32
        np.testing.assert_array_equal(unpacked, expected)


def test_int8_weights_have_the_order_of_the_kernels() -> None:
    """Inputs 4 g to 4 g + 3 of output o are at [o / 16, g, o % 16]."""
    weight = matrix((40, 130))
    integers, _ = quantize_rows(weight)
    packed = pack_int8(weight).integers
    for output, group in ((0, 0), (17, 3), (39, 31)):
        np.testing.assert_array_equal(
            packed[output // 16, group, output % 16], integers[output, 4 * group : 4 * group + 4]
        )


def initialisers(bundle: Bundle, part: str, precision: Precision) -> dict[str, Any]:
    graphs = bundle.graph_set(precision, "native")
    return dict(ir.load(bundle.file(getattr(graphs, part))).graph.initializers)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_tied_embedding_is_one_initialiser_of_the_decoder(bundle: Bundle, precision: Precision) -> None:
    panels = bundle.manifest.model.vocab_size // PANEL
    held = [value for value in initialisers(bundle, "decoder", precision).values() if value.shape[0] == panels]
    assert len(held) == 1
    # The encoder uses the same part of the same file.
    shared = [value for value in initialisers(bundle, "encoder", precision).values() if value.shape[0] == panels]
    assert [value.const_value.offset for value in shared] == [value.const_value.offset for value in held]
    assert held[0].const_value.offset % 64 == 0
