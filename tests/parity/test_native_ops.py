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

from antiphon.export.weights import pack_float, pack_int8, unpack_int8
from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.operator import NODE_PREFIXES
from antiphon.ops.operators.attention import (
    disentangled_attention,
    packed_attention,
    paged_cross_attention,
    paged_self_attention,
    paged_write,
    rotary,
)
from antiphon.ops.operators.linear import gate, linear
from antiphon.ops.operators.rows import add_norm, embed
from tests.operators import Pool, normal, packed_weight, ramp
from tests.parity import native_nodes
from tests.parity.native_nodes import attend, run_node

CLOSE = dict(rtol=2e-5, atol=2e-5)
EXAMPLES = settings(max_examples=40)
COUNTS = st.integers(1, 70)
WIDTHS = st.sampled_from([8, 10, 24, 32, 64, 128])
HEADS = st.integers(1, 4)
SPARE_HEADS = st.integers(0, 2)  # of the pool, behind those of the layer
NAMES = st.sampled_from([*ACTIVATIONS])
CACHES = st.sampled_from(["float32", "float16"])
BIASES = st.sampled_from(["none", "table", "slopes", "both"])

Floats = NDArray[np.float32]


def tensor(array: NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


def given_tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array)


def equal(found: Floats, expected: torch.Tensor, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found, expected.numpy(), rtol=CLOSE["rtol"], atol=CLOSE["atol"] * scale)


@EXAMPLES
@given(COUNTS, st.integers(1, 150), st.integers(1, 100), NAMES, st.booleans())
def test_linear_equals_eager(rows: int, inputs: int, outputs: int, activation: str, has_bias: bool) -> None:
    x, weight = normal(rows, inputs), normal(outputs, inputs)
    bias = normal(outputs) if has_bias else None
    arrays = {"x": x, "weight": pack_float(weight), "bias": bias}
    (found,) = run_node("Linear", arrays, width=outputs, activation=activation)
    expected = linear(given_tensor(x), given_tensor(weight), tensor(bias), activation=activation)
    equal(found, expected, inputs**0.5)
    (alone,) = run_node("Linear", {**arrays, "x": x[-1:]}, width=outputs, activation=activation)
    np.testing.assert_array_equal(alone, found[-1:])


def quantised_rows(x: Floats) -> tuple[NDArray[np.int32], Floats]:
    """Return integers minus their zero point, and steps [N, 1], as the contract defines them."""
    levels = np.where((x >= 0).all(axis=1, keepdims=True), 255, 127).astype(np.float32)
    size = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.divide(levels, size, out=np.zeros_like(size), where=size > 0)
    return np.rint(x * inverse).astype(np.int32), size / levels


@EXAMPLES
@given(COUNTS, st.integers(1, 150), st.integers(1, 100), NAMES, st.booleans(), st.booleans())
def test_quantized_linear_equals_integer_arithmetic(
    rows: int, inputs: int, outputs: int, activation: str, has_bias: bool, positive: bool
) -> None:
    x, weight = normal(rows, inputs) * np.geomspace(1e-4, 1e3, rows, dtype=np.float32)[:, None], normal(outputs, inputs)
    x = np.abs(x) if positive else x
    bias = normal(outputs) if has_bias else None
    packed = pack_int8(weight)
    arrays = {"x": x, **packed_weight(weight, "int8"), "bias": bias}
    (found,) = run_node("QuantizedLinear", arrays, width=outputs, activation=activation)
    (alone,) = run_node("QuantizedLinear", {**arrays, "x": x[-1:]}, width=outputs, activation=activation)
    np.testing.assert_array_equal(alone, found[-1:])
    integers, steps = quantised_rows(x)
    columns, scales = unpack_int8(packed.integers, outputs, inputs).astype(np.int32), packed.scales[:outputs]
    product = (integers @ columns.T) * scales * steps + (0 if bias is None else bias)
    expected = ACTIVATIONS[activation](given_tensor(product.astype(np.float32))).numpy()
    # An activation between two levels can be rounded either way: rarely, and by one level.
    level = steps * scales * 127
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


@EXAMPLES
@given(COUNTS, st.integers(1, 100), st.integers(1, 40), st.booleans())
def test_embed_equals_eager(rows: int, width: int, vocab: int, has_positions: bool) -> None:
    random = np.random.default_rng(rows)
    weight, table = normal(vocab, width), normal(30, width) if has_positions else None
    ids, positions = random.integers(0, vocab, rows), random.integers(0, 30, rows).astype(np.int32)
    packed = pack_int8(weight)
    integers = unpack_int8(packed.integers, vocab, width) * packed.scales[:vocab, None]
    places: dict[str, NDArray[Any] | None] = {"input_ids": ids, "positions": positions}
    attributes: dict[str, Any] = dict(width=width, vocab=vocab, scale=2.5)
    exact: dict[str, NDArray[Any]] = {"weight": pack_float(weight)}
    coarse: dict[str, NDArray[Any]] = {"weight": packed.integers, "scales": packed.scales}
    for op_type, weights, held in (("Embed", exact, weight), ("QuantizedEmbed", coarse, integers)):
        (found,) = run_node(op_type, {**places, **weights, "position_table": table}, **attributes)
        expected = embed(given_tensor(ids), given_tensor(positions), given_tensor(held), tensor(table), scale=2.5)
        equal(found, expected)


@EXAMPLES
@given(COUNTS, st.integers(1, 130), NAMES)
def test_gate_equals_eager(rows: int, width: int, activation: str) -> None:
    x = normal(rows, 2 * width) * 3
    found = native_nodes.gate(x, activation)
    equal(found, gate(given_tensor(x), activation=activation))
    alone = native_nodes.gate(x[-1:], activation)
    np.testing.assert_array_equal(alone, found[-1:])


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


@EXAMPLES
@given(COUNTS, st.integers(2, 140), st.sampled_from(["layer", "rms"]), st.booleans(), st.booleans(), st.booleans())
def test_add_norm_equals_eager(
    rows: int, width: int, kind: str, has_residual: bool, has_weight: bool, has_bias: bool
) -> None:
    arrays = {
        "x": normal(rows, width) * 4 + 1,
        "residual": normal(rows, width, seed=1) if has_residual else None,
        "weight": normal(width) if has_weight else None,
        "bias": normal(width, seed=2) if has_bias else None,
    }
    found = run_node("AddNorm", arrays, epsilon=1e-5, kind=kind)
    x, residual, weight, bias = (tensor(array) for array in arrays.values())
    assert x is not None
    for ours, expected in zip(found, add_norm(x, residual, weight, bias, epsilon=1e-5, kind=kind), strict=True):
        equal(ours, expected, 5)
    alone = {name: array[-1:] if array is not None and array.ndim == 2 else array for name, array in arrays.items()}
    np.testing.assert_array_equal(run_node("AddNorm", alone, epsilon=1e-5, kind=kind)[0], found[0][-1:])


def biases(kind: str, heads: int, reach: int = 5) -> dict[str, Floats | None]:
    return {
        "bias_table": normal(heads, 2 * reach + 1) if kind in ("table", "both") else None,
        "slopes": np.abs(normal(heads)) if kind in ("slopes", "both") else None,
    }


@EXAMPLES
@given(
    st.lists(st.integers(1, 70) | st.integers(1, 300), min_size=1, max_size=5),
    HEADS, WIDTHS, BIASES, st.booleans(), st.booleans(),
)  # fmt: skip
def test_packed_attention_equals_eager(
    lens: list[int], heads: int, width: int, kind: str, causal: bool, is_rotated: bool
) -> None:
    qkv, added = normal(sum(lens), 3 * heads * width), biases(kind, heads)
    positions, table = np.random.default_rng(len(lens)).integers(0, 50, sum(lens)).astype(np.int32), normal(50, width)
    rotation = {"positions": positions, "rotary_table": table} if is_rotated else {}
    attributes: dict[str, Any] = dict(num_heads=heads, scale=width**-0.5, causal=int(causal))
    found = attend("PackedAttentionSublayer", {"qkv": qkv, "offsets": ramp(lens), **added, **rotation}, **attributes)
    turned = given_tensor(qkv)
    if is_rotated:
        turned = rotary(turned, given_tensor(positions), given_tensor(table), num_heads=heads)
    expected = packed_attention(
        turned, given_tensor(ramp(lens)), *map(tensor, added.values()),
        num_heads=heads, scale=width**-0.5, causal=causal,
    )  # fmt: skip
    equal(found, expected)
    own = {name: array[-lens[-1] :] if name == "positions" else array for name, array in rotation.items()}
    last = {"qkv": qkv[-lens[-1] :], "offsets": ramp(lens[-1:]), **added, **own}
    alone = attend("PackedAttentionSublayer", last, threads=2, **attributes)
    np.testing.assert_array_equal(alone, found[-lens[-1] :])


@EXAMPLES
@given(
    st.lists(st.integers(1, 70) | st.integers(1, 300), min_size=1, max_size=5), HEADS, WIDTHS,
    st.sampled_from([(True, True), (True, False), (False, True), (False, False)]), st.sampled_from([0, 4, 40, 400]),
    st.integers(0, 3),
)  # fmt: skip
def test_disentangled_attention_equals_eager(
    lens: list[int], heads: int, width: int, kinds: tuple[bool, bool], reach: int, step: int
) -> None:
    """Rows of relative positions can be equal, adjacent or skipped, and distances can exceed the maximum."""
    qkv = normal(sum(lens), 3 * heads * width)
    rows = np.cumsum(np.random.default_rng(reach).integers(0, step + 1, 2 * reach + 1)).astype(np.int32)
    tables = {
        name: normal(int(rows[-1]) + 2, heads * width, seed=index) if is_there else None
        for index, (name, is_there) in enumerate(zip(("position_keys", "position_queries"), kinds, strict=True))
    }
    attributes: dict[str, Any] = dict(num_heads=heads, scale=(3 * width) ** -0.5)
    arrays = {"qkv": qkv, "offsets": ramp(lens), "position_rows": rows, **tables}
    (found,) = run_node("DisentangledAttention", arrays, **attributes)
    expected = disentangled_attention(*map(tensor, arrays.values()), **attributes)
    equal(found, expected)
    last = {**arrays, "qkv": qkv[-lens[-1] :], "offsets": ramp(lens[-1:])}
    (alone,) = run_node("DisentangledAttention", last, threads=2, **attributes)
    np.testing.assert_array_equal(alone, found[-lens[-1] :])


ROWS = st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 280), st.integers(1, 20)), min_size=1, max_size=5)


@EXAMPLES
@given(ROWS, HEADS, SPARE_HEADS, WIDTHS, CACHES, BIASES, st.booleans())
def test_paged_self_attention_equals_eager(
    rows: list[tuple[int, int]], heads: int, spare: int, width: int, dtype: str, kind: str, is_rotated: bool
) -> None:
    """Rows are (cached positions, new tokens). Unwritten slots are NaN and must be neither read nor changed."""
    held, new = [past for past, _ in rows], [count for _, count in rows]
    pool = Pool([past + count for past, count in rows], heads, width, dtype, spare_heads=spare)
    pool.hold(1, held)
    added, before = biases(kind, heads), pool.cache.copy()
    qkv = normal(sum(new), 3 * heads * width)
    positions = np.concatenate([np.arange(past, past + count, dtype=np.int32) for past, count in rows])
    given_rows = {"block_tables": pool.tables, "offsets": ramp(new), "positions": positions, **added}
    attributes: dict[str, Any] = dict(num_heads=heads, scale=width**-0.5, layer=1)
    rotation = {"rotary_table": normal(int(positions.max()) + 1, width)} if is_rotated else {}
    arrays = {"qkv": qkv, "cache": pool.cache, **given_rows, **rotation}
    found = attend("PagedSelfAttentionSublayer", arrays, **attributes)
    turned = given_tensor(qkv)
    if is_rotated:
        turned = rotary(turned, given_tensor(positions), given_tensor(rotation["rotary_table"]), num_heads=heads)
    rest: list[Any] = [tensor(array) for array in given_rows.values()]
    expected, cache = paged_self_attention(turned, given_tensor(before), *rest, **attributes)
    if is_rotated:  # a sum of two products may round differently
        tolerance = 2e-3 if dtype == "float16" else CLOSE["atol"]
        np.testing.assert_allclose(found, expected.numpy(), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(pool.cache, cache.numpy(), rtol=tolerance, atol=tolerance)
    else:
        equal(found, expected)
        np.testing.assert_array_equal(pool.cache, cache.numpy())
    again, last = before.copy(), new[-1]
    alone = {
        "qkv": qkv[-last:], "cache": again, "block_tables": pool.tables[-1:], "offsets": ramp([last]),
        "positions": positions[-last:], **added, **rotation,
    }  # fmt: skip
    single = attend("PagedSelfAttentionSublayer", alone, threads=2, **attributes)
    np.testing.assert_array_equal(single, found[-last:])


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(1, 40) | st.integers(1, 300), st.integers(1, 4)), min_size=1, max_size=5),
    HEADS, SPARE_HEADS, WIDTHS, CACHES,
)  # fmt: skip
def test_paged_write_and_cross_attention_equal_eager(
    rows: list[tuple[int, int]], heads: int, spare: int, width: int, dtype: str
) -> None:
    """Rows are (source length, number of tokens that attend to it)."""
    lens, tokens = [length for length, _ in rows], [count for _, count in rows]
    pool = Pool(lens, heads, width, dtype, spare_heads=spare)
    kv, before = normal(sum(lens), 2 * heads * width), pool.cache.copy()
    source = {"block_tables": pool.tables, "offsets": ramp(lens), "after": np.zeros(1, np.int32)}
    (written,) = run_node("PagedWrite", {"kv": kv, "cache": pool.cache, **source}, num_heads=heads, layer=1)
    assert written.tolist() == [sum(lens)]
    _, cache = paged_write(
        given_tensor(kv), given_tensor(before), *map(tensor, source.values()), num_heads=heads, layer=1
    )
    np.testing.assert_array_equal(pool.cache, cache.numpy())
    query = normal(sum(tokens), heads * width)
    attributes: dict[str, Any] = dict(num_heads=heads, scale=0.2, layer=1)
    reading = {
        "block_tables": pool.tables, "offsets": ramp(tokens), "source_lens": np.array(lens, np.int32),
    }  # fmt: skip
    found = attend("PagedCrossAttentionSublayer", {"query": query, "cache": pool.cache, **reading}, **attributes)
    equal(found, paged_cross_attention(
        given_tensor(query), cache, *map(given_tensor, reading.values()), **attributes
    ))  # fmt: skip
    last = {
        "query": query[-tokens[-1] :], "cache": pool.cache, "block_tables": pool.tables[-1:],
        "offsets": ramp(tokens[-1:]), "source_lens": reading["source_lens"][-1:],
    }  # fmt: skip
    alone = attend("PagedCrossAttentionSublayer", last, threads=2, **attributes)
    np.testing.assert_array_equal(alone, found[-tokens[-1] :])


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


def test_layers_of_a_pool_are_separate() -> None:
    pool = Pool([20], 2, 24, "float32", layers=3)
    before, kv = pool.cache.copy(), normal(20, 2 * 48)
    arrays = {"kv": kv, "cache": pool.cache, "block_tables": pool.tables, "offsets": ramp([20])}
    run_node("PagedWrite", arrays, num_heads=2, layer=1)
    np.testing.assert_array_equal(pool.cache[:, [0, 2]], before[:, [0, 2]])
    assert np.isfinite(pool.cache[:, 1]).any()


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
