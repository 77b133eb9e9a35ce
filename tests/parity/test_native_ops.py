"""Every native operator, run by ONNX Runtime, compared with its eager reference, for many shapes.

Tolerances: float32 sums in another order differ by a few parts in a million. Rows must also be bit-identical alone and
in a batch, and on one thread and two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from antiphon.bundle.manifest import Precision
from antiphon.export.weights import pack_float, unpack_weight
from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.operator import NODE_PREFIXES, Operator, torch_operator
from antiphon.ops.operators.recurrence import PAGED_AVERAGE, SSRU_SUBLAYER
from antiphon.ops.operators.sample import SAMPLE
from tests.operators import (
    NODES,
    Array,
    Arrays,
    Call,
    Floats,
    Pool,
    call,
    ints,
    normal,
    packed,
    packed_weight,
    ramp,
    random_sizes,
)
from tests.parity import native_nodes
from tests.parity.native_nodes import attend, run_node

FLOAT32 = [name for name, (operator, precision) in NODES.items() if precision == "float32" and operator is not SAMPLE]
EXAMPLES = settings(max_examples=40)


def tensor(array: Array | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def given_tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array)


@pytest.mark.parametrize("name", [*FLOAT32, "QuantizedEmbed"])
@EXAMPLES
@given(seed=st.integers(0, 2**32 - 1))
def test_operator_equals_eager_alone_and_together(name: str, seed: int) -> None:
    """Unwritten positions of the cache are NaN, and must be neither read nor changed."""
    (operator, precision), rng = NODES[name], np.random.default_rng(seed)
    arrays, attributes = call(operator, random_sizes(operator, rng), rng)
    node = packed(operator, (arrays, attributes), precision)
    if precision == "int8":
        weight = arrays["weight"]
        assert weight is not None
        parts = [node[0][part] for part in ("weight", "scales")]
        arrays["weight"] = unpack_weight(parts, precision, *weight.shape)  # type: ignore[arg-type]
    results = torch_operator(operator)(*map(tensor, arrays.values()), **attributes)
    results = (results,) if isinstance(results, Tensor) else results
    expected = {output.name: result for output, result in zip(operator.outputs, results, strict=True)}
    cache = arrays.get("cache")
    found, changed = run_copied(name, node)
    weights = [array for weight in operator.weights if (array := arrays[weight.name]) is not None]
    summed = max([1, *(weight.shape[-1] for weight in weights)])  # a bias alone, if there are no inputs
    tolerance = 2e-5
    if "present" in expected and operator in (SSRU_SUBLAYER, PAGED_AVERAGE):
        found_states, states = (pool.view(np.float32) for pool in (changed, expected["present"].numpy()))
        np.testing.assert_allclose(found_states, states, rtol=2e-5, atol=2e-5)
    elif "present" in expected:
        # Products are added in another order, and then round to another number of the cache's type.
        bound = 0 if not operator.weights else 2e-3 if changed.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(changed, expected["present"], rtol=bound, atol=bound)
        if not np.array_equal(changed, expected["present"], equal_nan=True):
            tolerance = max(tolerance, bound)  # the other number is attended to
    elif cache is not None:
        np.testing.assert_array_equal(changed, cache)
    for output, result in zip(operator.node().outputs, found, strict=True):
        np.testing.assert_allclose(result, expected[output.name], rtol=2e-5, atol=tolerance * summed**0.5)
    count, alone = last_row(operator, node[0])
    again, _ = run_copied(name, (alone, node[1]), threads=2)
    for output, result, single in zip(operator.node().outputs, found, again, strict=True):
        if output.axes.startswith("N"):
            np.testing.assert_array_equal(single, result[max(0, len(result) - count) :])


def run_copied(name: str, node: Call, threads: int = 1) -> tuple[list[Array], Array]:
    """Return the outputs, and the changed copy of the cache."""
    arrays, cache = dict(node[0]), node[0].get("cache")
    if cache is not None:
        arrays["cache"] = cache = cache.copy()
    return run_node(name, arrays, threads=threads, **node[1]), ints() if cache is None else cache


def last_row(operator: Operator, arrays: Arrays) -> tuple[int, Arrays]:
    """Return the inputs of the last token, sequence or row alone, and its number of tokens."""
    offsets = arrays.get("offsets") if any(port.name == "offsets" for port in operator.inputs) else None
    first_axes = {port.name: port.axes.split(",")[0] for port in operator.inputs}
    count = 1 if offsets is None else int(np.diff(offsets, prepend=0)[-1])

    def part(name: str, array: Array | None) -> Array | None:
        axis = first_axes.get(name)
        if array is None or axis is None:
            return array
        if axis == "N":
            return array[max(0, len(array) - count) :]
        if axis in ("R + 1", "B + 1"):
            return ramp([count] * (len(array) > 1))
        return array[-1:] if axis in ("R", "B") else array

    return count, {name: part(name, array) for name, array in arrays.items()}


def quantised_rows(x: Floats) -> tuple[NDArray[np.int32], Floats]:
    """Return integers minus their zero point, and steps [N, 1], as the contract defines them."""
    levels = np.where((x >= 0).all(axis=1, keepdims=True), 255, 127).astype(np.float32)
    size = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.divide(levels, size, out=np.zeros_like(size), where=size > 0)
    return np.rint(x * inverse).astype(np.int32), size / levels


@pytest.mark.parametrize("precision", ["int8", "int4"])
@EXAMPLES
@given(
    st.integers(1, 70), st.integers(1, 150), st.integers(1, 100), st.sampled_from([*ACTIVATIONS]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_integer_product_equals_integer_arithmetic(
    precision: Precision, rows: int, inputs: int, outputs: int, activation: str, has_bias: bool, positive: bool
) -> None:
    x, weight = normal(rows, inputs) * np.geomspace(1e-4, 1e3, rows, dtype=np.float32)[:, None], normal(outputs, inputs)
    x = np.abs(x) if positive else x
    bias, parts = normal(outputs) if has_bias else None, packed_weight(weight, precision)
    node, arrays = f"{NODE_PREFIXES[precision]}Linear", {"x": x, **parts, "bias": bias}
    (found,) = run_node(node, arrays, width=outputs, activation=activation)
    (alone,) = run_node(node, {**arrays, "x": x[-1:]}, width=outputs, activation=activation)
    np.testing.assert_array_equal(alone, found[-1:])
    integers, steps = quantised_rows(x)
    stored = unpack_weight([part for part in parts.values() if part is not None], precision, outputs, inputs)
    product = integers @ stored.T.astype(np.float64) * steps + (0 if bias is None else bias)
    expected = ACTIVATIONS[activation](given_tensor(product.astype(np.float32))).numpy()
    # An activation between two levels can be rounded either way: rarely, and by one level.
    level = steps * np.abs(stored).max(axis=1)
    assert (np.abs(found - expected) <= 1e-5 * np.abs(product) + 1.2 * level + 1e-6).all()
    exact = np.isclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(product).max())
    assert exact.mean() > 0.9


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_product_of_a_row_of_zeros_is_its_bias(sign: int, precision: str) -> None:
    x, bias = sign * np.zeros((3, 70), np.float32), normal(24)
    x[1] = 1
    arrays = {"x": x, **packed_weight(normal(24, 70), precision), "bias": bias}
    (found,) = run_node(f"{NODE_PREFIXES[precision]}Linear", arrays, width=24, activation="none")
    np.testing.assert_array_equal(found[[0, 2]], np.stack([bias, bias]))


@pytest.mark.parametrize("precision", NODE_PREFIXES)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200])
def test_products_are_bit_identical_alone_in_a_batch_and_on_two_threads(precision: str, rows: int) -> None:
    """The arrays are large enough for rows and columns to be divided among tasks."""
    op_type, x = f"{NODE_PREFIXES[precision]}Linear", normal(rows, 320)
    arrays = {"x": x, **packed_weight(normal(1500, 320), precision)}
    attributes: dict[str, Any] = dict(width=1500, activation="relu")
    (found,) = run_node(op_type, arrays, **attributes)
    (parallel,) = run_node(op_type, arrays, threads=2, **attributes)
    np.testing.assert_array_equal(parallel, found)
    for row in {0, rows // 2, rows - 1}:
        (alone,) = run_node(op_type, {**arrays, "x": x[[row]]}, threads=2, **attributes)
        np.testing.assert_array_equal(alone, found[[row]])


def activated(values: Floats, activation: str) -> Floats:
    """Return activation(values), as a product with one input computes it."""
    arrays = {"x": values[:, None], "weight": pack_float(np.ones((1, 1), np.float32))}
    return run_node("Linear", arrays, width=1, activation=activation)[0][:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_huge_numbers_equal_eager(activation: str) -> None:
    """An exponential overflows, or meets a factor that it cannot cancel, long before its argument overflows."""
    values = np.array([-1e30, -1000, -100, -88.5, -1e-30, 0, 1e-30, 88.5, 100, 1000, 1e30], np.float32)
    expected = ACTIVATIONS[activation](given_tensor(values))
    np.testing.assert_allclose(activated(values, activation), expected, rtol=1e-6, atol=1e-12)
    gated = np.array([native_nodes.gate(np.array([[x, 1]], np.float32), activation)[0, 0] for x in values])
    np.testing.assert_array_equal(gated, activated(values, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_propagate_nan(activation: str) -> None:
    found = activated(np.array([1, np.nan, 3], np.float32), activation)
    assert np.isnan(found).tolist() == [False, True, False]


def test_paged_operators_are_bit_identical_when_threads_share_the_heads() -> None:
    """A few rows are long enough for the heads of a row to be divided among tasks."""
    lens = [700, 3, 1200]
    pool = Pool(lens, 8, 64, "float16")
    for layer in (0, 1):
        pool.hold(layer, [length - 1 for length in lens], seed=layer)
    qkv, positions = normal(3, 3 * 512), np.array(lens, np.int32) - 1
    rows = {"block_tables": pool.tables, "offsets": ramp([1, 1, 1])}
    found = []
    for threads in (1, 2):
        arrays = {"qkv": qkv, "cache": pool.cache.copy(), **rows, "positions": positions}
        own = attend("PagedSelfAttentionSublayer", arrays, threads=threads, num_heads=8, scale=0.1, layer=1)
        reading = {
            "query": qkv[:, :512].copy(), "cache": pool.cache, **rows, "source_lens": np.array(lens, np.int32) - 1,
        }  # fmt: skip
        source = attend("PagedCrossAttentionSublayer", reading, threads=threads, num_heads=8, scale=0.1, layer=0)
        found.append((own, source))
    for single, double in zip(*found, strict=True):
        np.testing.assert_array_equal(single, double)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0xFFC12345], ids=hex)
def test_packed_attention_propagates_every_nan(bits: int) -> None:
    """A key with NaN must not be treated as a masked key."""
    qkv = normal(5, 3 * 2 * 8)
    qkv[2, 16 + 3] = np.array(bits, np.uint32).view(np.float32)
    # Without tables it is the attention of PackedAttentionSublayer, whose product would spread NaN to other heads.
    arrays = {"qkv": qkv, "offsets": ramp([5]), "position_rows": np.zeros(1, np.int32)}
    (found,) = run_node("DisentangledAttention", arrays, num_heads=2, scale=0.35)
    assert np.isnan(found[:, :8]).all()
    assert np.isfinite(found[:, 8:]).all()


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200])
def test_outliers_of_an_integer_product_are_multiplied_in_float32(precision: Precision, rows: int) -> None:
    """The other inputs are quantised as in a row where the outliers are zero."""
    x, weight, bias, columns = normal(rows, 150), normal(100, 150), normal(100), ints(0, 17, 149)
    x[:, columns] *= 300
    rest = x.copy()
    rest[:, columns] = 0
    node, parts = f"{NODE_PREFIXES[precision]}Linear", {**packed_weight(weight, precision), "bias": bias}
    kept = {"outlier_inputs": columns, "outlier_weight": pack_float(np.ascontiguousarray(weight[:, columns]))}
    attributes: dict[str, Any] = dict(width=100, activation="none")
    (found,) = run_node(node, {"x": x, **parts, **kept}, **attributes)
    (alone,) = run_node(node, {"x": x[-1:], **parts, **kept}, threads=2, **attributes)
    np.testing.assert_array_equal(alone, found[-1:])
    (others,) = run_node(node, {"x": rest, **parts}, **attributes)
    np.testing.assert_allclose(found, others + x[:, columns] @ weight[:, columns].T, rtol=1e-5, atol=2e-3)
    (rounded,) = run_node(node, {"x": x, **parts}, **attributes)
    exact = x @ weight.T + bias
    assert np.square(found - exact).mean() < np.square(rounded - exact).mean() / (100 if precision == "int8" else 10)
