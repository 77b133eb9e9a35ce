"""Invalid input of native operators is refused with the operator's name and the value, and the process continues.

The kernels check nothing themselves, so every input that could cause an invalid memory access must be refused before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.export.weights import pack_float, pack_int8
from antiphon.ops.operator import NODE_PREFIXES
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.linear import LINEAR
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, neutral_sampling
from tests.operators import NODES, SUBLAYERS, ints, normal, ramp, small_call, small_sizes
from tests.parity.native_nodes import run_node

HEADS = small_sizes(LINEAR).heads


def float_param(name: str, *values: float) -> dict[str, Any]:
    """Return float parameters of two samples with these values of one parameter."""
    sampling = neutral_sampling(2)
    sampling.floats(name)[:] = values
    return {"float_params": sampling.float_params}


def int_param(name: str, *values: int) -> dict[str, Any]:
    """Return integer parameters of two samples with these values of one parameter."""
    sampling = neutral_sampling(2)
    sampling.ints(name)[:] = values
    return {"int_params": sampling.int_params}


def edit(bias: float, penalty: float, shift: float) -> dict[str, Any]:
    """Return one invalid logits processor after a valid one."""
    return {"edit_values": np.array([(0, 1, 0), (bias, penalty, shift)], np.float32)}


# Operator, change (new value of an input or attribute), required text of the message.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("Embed", {"input_ids": np.array([0, 20, 3])}, "input_ids is 20"),
    ("Embed", {"input_ids": np.array([0, -1, 3])}, "input_ids is -1"),
    ("Embed", {"positions": ints(0, 1, 4)}, "positions is 4"),
    ("Embed", {"positions": ints(-3, 1, 2)}, "positions is -3"),
    ("Embed", {"positions": ints(0, 1)}, "length of positions is 2"),
    ("Embed", {"position_table": normal(4, 9)}, "position_table is 9"),
    ("Embed", {"weight": pack_float(normal(20, 7))}, "weight"),
    ("Embed", {"weight": pack_float(normal(40, 8))}, "weight"),
    ("QuantizedEmbed", {"input_ids": np.array([0, 20, 3])}, "input_ids is 20"),
    ("QuantizedEmbed", {"positions": ints(0, 1, 4)}, "positions is 4"),
    ("QuantizedEmbed", {"scales": normal(7)}, "scales"),
    ("QuantizedEmbed", {"vocab": 40}, "weight"),
    ("Linear", {"x": normal(3, 9)}, "weight"),
    ("Linear", {"width": 40}, "weight"),
    ("Linear", {"bias": normal(19)}, "bias"),
    ("Linear", {"x": normal(3)}, "x has 1 dimensions"),
    ("Linear", {"activation": "swish"}, "activation is swish"),
    ("QuantizedLinear", {"x": normal(3, 80)}, "weight"),
    ("QuantizedLinear", {"scales": normal(7)}, "scales"),
    ("QuantizedLinear", {"column_sums": ints(1, 2)}, "column_sums"),
    ("QuantizedLinear", {"outlier_inputs": ints(0, 8), "outlier_weight": normal(2, 2, 16)}, "outlier_inputs is 8"),
    ("QuantizedLinear", {"outlier_inputs": ints(-1), "outlier_weight": normal(2, 1, 16)}, "outlier_inputs is -1"),
    ("QuantizedLinear", {"outlier_inputs": ints(0, 3), "outlier_weight": normal(2, 1, 16)}, "outlier_weight"),
    ("QuantizedLinear", {"outlier_inputs": ints(0)}, "outlier_weight is missing beside outlier_inputs"),
    ("NibbleLinear", {"outlier_weight": normal(2, 1, 16)}, "outlier_inputs is missing beside outlier_weight"),
    ("NibbleLinear", {"x": normal(3, 80)}, "weight"),
    ("NibbleLinear", {"ratios": np.ones((2, 1, 16), np.float16)}, "ratios"),
    ("NibbleLinear", {"scales": normal(7)}, "scales"),
    ("NibbleLinear", {"offsets": normal(20)}, "offsets"),
    ("NibbleLinear", {"bias": normal(19)}, "bias"),
    ("AddNorm", {"residual": normal(2, 8)}, "residual is 2"),
    ("AddNorm", {"residual": normal(3, 6)}, "residual is 6"),
    ("AddNorm", {"weight": normal(9)}, "weight is 9"),
    ("AddNorm", {"bias": normal(1)}, "bias is 1"),
    ("AddNorm", {"kind": "batch"}, "kind is batch"),
    ("Linear", {"width": 2**63 - 1}, "width is 9223372036854775807"),
    ("Sample", {"vocab": -1}, "vocab is -1"),
    ("DisentangledAttention", {"position_rows": ints(0, 1)}, "position_rows is 2"),
    ("DisentangledAttention", {"position_rows": ints()}, "position_rows is 0"),
    ("DisentangledAttention", {"position_rows": ints(0, 1, 99)}, "position_rows is 99"),
    ("DisentangledAttention", {"position_rows": ints(0, 2, 1)}, "position_rows is 1"),
    ("DisentangledAttention", {"position_rows": ints(-1, 2, 3)}, "position_rows is -1"),
    ("DisentangledAttention", {"position_keys": normal(5, 8)}, "position_keys is 8"),
    ("DisentangledAttention", {"position_queries": normal(0, 16)}, "position_rows is "),
    ("DisentangledAttention", {"position_queries": normal(5, 17)}, "position_queries is 17"),
    ("DisentangledAttention", {"offsets": ramp([2, 2])}, "offsets is 4"),
    ("PagedWrite", {"offsets": ramp([20, 6])}, "offsets is 26"),
    ("PagedWrite", {"offsets": ramp([5, 20])}, "block_tables is -7"),
    ("PagedWrite", {"kv": normal(25, 33)}, "kv is 33"),
    ("PagedWrite", {"layer": -1}, "layer is -1"),
    ("Sample", {"positions": ints(0, 1)}, "positions is 2"),
    ("Sample", {"picks": ints(0, 3)}, "picks is 3.* below 3"),
    ("Sample", {"picks": ints(-1, 2)}, "picks is -1"),
    ("Sample", {"picks": ints(0)}, "rows of float_params is 2.* number of picks"),
    ("Sample", float_param("temperature", 0, -1), "temperature of sample is 1"),
    ("Sample", float_param("temperature", np.nan, 1), "temperature of sample is 0"),
    ("Sample", float_param("top_p", np.nan, 1), "top_p of sample is 0"),
    ("Sample", float_param("min_p", 0, np.nan), "min_p of sample is 1"),
    ("Sample", float_param("min_p", 1.5, 0), "min_p of sample is 0"),
    ("Sample", float_param("typical_p", np.nan, 1), "typical_p of sample is 0"),
    ("Sample", float_param("typical_p", 1, -0.5), "typical_p of sample is 1"),
    ("Sample", {"float_params": normal(2, 3)}, f"columns of float_params is 3.* must be {len(FLOAT_PARAMS)}"),
    ("Sample", int_param("top_k", 1, -2), "top_k is -2"),
    ("Sample", int_param("forced_id", -1, 20), "forced_id is 20"),
    ("Sample", int_param("forced_id", -2, -1), "forced_id is -2"),
    ("Sample", int_param("forced_id", 2**63 - 1, -1), "forced_id is 9223372036854775807"),
    ("Sample", int_param("num_logprobs", 1025, 0), "num_logprobs is 1025"),
    ("Sample", int_param("num_logprobs", 0, -2), "num_logprobs is -2"),
    ("Sample", int_param("is_normalized", 0, 2), "is_normalized is 2"),
    ("Sample", int_param("restriction", -1, 0), "restriction is -1"),
    ("Sample", int_param("restriction", 0, 3), "restriction is 3.* 0, 1 or 2"),
    ("Sample", int_param("restriction", 0, 2), "edits of a selected sample is 1.* an edit for each token"),
    ("Sample", int_param("restriction", 2, 0) | {"edit_ids": ints(3, 1)}, "edit_ids is 1.* sample's vocabulary"),
    ("Sample", {"int_params": np.zeros((1, len(INT_PARAMS)), np.int64)}, "rows of int_params is 1.* number of picks"),
    ("Sample", {"int_params": np.zeros((2, 3), np.int64)}, f"columns of int_params is 3.* must be {len(INT_PARAMS)}"),
    ("Sample", {"edit_offsets": ints(0, 2)}, "edit_offsets is 2"),
    ("Sample", {"edit_offsets": ints(0, 2, 1)}, "edit_offsets is 1.* rise"),
    ("Sample", {"edit_offsets": ints(-1, 0, 0)}, "edit_offsets is -1"),
    ("Sample", {"edit_offsets": ints(0, 2, 3)}, "edit_offsets is 3.* to 2 at most"),
    ("Sample", {"edit_ids": ints(0, 20)}, "edit_ids is 20"),
    ("Sample", {"edit_ids": ints(-1, 0)}, "edit_ids is -1"),
    ("Sample", {"edit_ids": ints(0)}, "edit_values is 2"),
    ("Sample", {"edit_values": normal(2, 2)}, "width of edit_values is 2"),
    ("Sample", edit(np.nan, 1, 0), "edit_values of edit is 1"),
    ("Sample", edit(np.inf, 1, 0), "edit_values of edit is 1"),
    ("Sample", edit(0, 0, 0), "edit_values of edit is 1"),
    ("Sample", edit(0, -2, 0), "edit_values of edit is 1"),
    ("Sample", edit(0, np.nan, 0), "edit_values of edit is 1"),
    ("Sample", edit(0, np.inf, 0), "edit_values of edit is 1"),
    ("Sample", edit(0, 1, np.nan), "edit_values of edit is 1"),
    ("Sample", edit(0, 1, np.inf), "edit_values of edit is 1"),
    ("Sample", {"vocab": 200}, "weight"),
    ("Sample", {"bias": normal(19)}, "bias dimension 0 is 19.* must be 20"),
    ("QuantizedSample", {"bias": normal(21)}, "bias dimension 0 is 21.* must be 20"),
]


BAD_SUBLAYERS: list[tuple[str, dict[str, Any], str]] = [
    ("FeedForwardSublayer", {"inner_width": 36}, "inner_weight dimension 0 is 2; it must be 3"),
    ("FeedForwardSublayer", {"inner_width": 19}, "inner_width is 19"),
    ("FeedForwardSublayer", {"inner_bias": normal(9)}, "inner_bias dimension 0 is 9"),
    ("FeedForwardSublayer", {"outer_bias": normal(25)}, "outer_bias dimension 0 is 25"),
    ("FeedForwardSublayer", {"residual": normal(2, 8)}, "residual is 2"),
    ("FeedForwardSublayer", {"norm_weight": normal(9)}, "norm_weight is 9"),
    ("FeedForwardSublayer", {"kind": "batch"}, "kind is batch"),
    ("FeedForwardSublayer", {"activation": "swish"}, "activation is swish"),
    ("PackedAttentionSublayer", {"qkv_width": 49}, "qkv_width is 49"),
    ("PackedAttentionSublayer", {"qkv_bias": normal(1)}, "qkv_bias dimension 0 is 1"),
    ("PackedAttentionSublayer", {"out_bias": normal(1)}, "out_bias dimension 0 is 1"),
    ("PackedAttentionSublayer", {"offsets": ramp([2, 2])}, "offsets is 4"),
    ("PackedAttentionSublayer", {"norm_bias": normal(7)}, "norm_bias is 7"),
    ("PagedSelfAttentionSublayer", {"positions": ints(19, -1)}, "positions is -1"),
    ("PagedSelfAttentionSublayer", {"layer": 2}, "layer is 2"),
    ("PagedSelfAttentionSublayer", {"rotary_table": normal(20, 6)}, "width of rotary_table is 6"),
    ("PagedSelfAttentionSublayer", {"rotary_table": normal(19, 8)}, "positions is 19; it must be 0 to 18"),
    ("PagedCrossAttentionSublayer", {"query_width": 15}, "query_width is 15"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(0, 1)}, "source_lens is 0"),
    ("PagedCrossAttentionSublayer", {"residual": normal(2, 7)}, "residual is 7"),
    ("PackedAttentionSublayer", {"positions": ints(0, 1, 0, 4, 1)}, "positions is 4"),
    ("PackedAttentionSublayer", {"rotary_table": normal(4, 6)}, "rotary_table is 6"),
    ("PackedAttentionSublayer", {"num_heads": 5}, "qkv_width is 48"),
    ("PackedAttentionSublayer", {"num_heads": 0}, "num_heads is 0"),
    ("PackedAttentionSublayer", {"offsets": ramp([2, 2])}, "offsets is 4"),
    ("PackedAttentionSublayer", {"offsets": ints(1, 2, 5)}, "offsets.* is 1"),
    ("PackedAttentionSublayer", {"offsets": ints(0, 7, 5)}, "offsets is 5"),
    ("PackedAttentionSublayer", {"offsets": ints()}, "offsets is 0"),
    ("PackedAttentionSublayer", {"bias_table": normal(3, 5)}, "bias_table is 3"),
    ("PackedAttentionSublayer", {"bias_table": normal(HEADS, 4)}, "bias_table is 4"),
    ("PackedAttentionSublayer", {"slopes": normal(1)}, "slopes is 1"),
    ("PackedAttentionSublayer", {"num_heads": 7}, "qkv_width is 48"),
    ("PagedSelfAttentionSublayer", {"block_tables": ints(10_000, 1, 2, 3).reshape(2, 2)}, "block_tables is 10000"),
    ("PagedSelfAttentionSublayer", {"block_tables": ints(-1, 1, 2, 3).reshape(2, 2)}, "block_tables is -1"),
    (
        "PagedSelfAttentionSublayer",
        {"block_tables": ints(0, 1).reshape(2, 1)},
        "block_tables is 1.*20 positions",
    ),
    ("PagedSelfAttentionSublayer", {"block_tables": ints(0, 1).reshape(1, 2)}, "rows of block_tables is 1"),
    ("PagedSelfAttentionSublayer", {"positions": ints(19, -1)}, "positions is -1"),
    ("PagedSelfAttentionSublayer", {"positions": ints(19, 2**31 - 1)}, "block_tables"),
    ("PagedSelfAttentionSublayer", {"positions": ints(19)}, "positions is 1"),
    ("PagedSelfAttentionSublayer", {"offsets": ramp([1, 0])}, "offsets is 1"),
    ("PagedSelfAttentionSublayer", {"offsets": ints(0, 2**31 - 1, -(2**31))}, "offsets"),
    ("PagedSelfAttentionSublayer", {"offsets": ramp([2])}, "block_tables is 2|positions is 4"),
    ("PagedSelfAttentionSublayer", {"layer": 2}, "layer is 2"),
    ("PagedSelfAttentionSublayer", {"cache": np.zeros((4, 2, 2, HEADS, 128), np.float32)}, "width of cache is 128"),
    ("PagedSelfAttentionSublayer", {"cache": np.zeros((4, 2, 1, HEADS, 256), np.float32)}, "cache is 1"),
    (
        "PagedSelfAttentionSublayer",
        {"cache": np.zeros((4, 2, 2, 1, 256), np.float32)},
        "heads of cache is 1.* at least num_heads",
    ),
    (
        "PagedSelfAttentionSublayer",
        {"cache": np.zeros((4, 2, 2, HEADS, 256), np.int16)},
        "cache must be float32 or float16",
    ),
    (
        "PagedSelfAttentionSublayer",
        {"cache": np.zeros((4, 2, 2, HEADS, 256), np.float64)},
        "cache must be float32 or float16",
    ),
    ("PagedSelfAttentionSublayer", {"cache": np.zeros((4, 2, 2, 512), np.float32)}, "cache has 4 dimensions"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(49, 5)}, "width of block_tables is 3.*49 positions"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(33, 5)}, "block_tables is -7"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(20, 0)}, "source_lens is 0"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(20, -4)}, "source_lens is -4"),
    ("PagedCrossAttentionSublayer", {"source_lens": ints(20)}, "source_lens is 1"),
    ("PagedCrossAttentionSublayer", {"query_width": 48}, "width of cache"),
    ("PackedAttentionSublayer", {"positions": ints(0, 1)}, "length of positions is 2"),
    ("PackedAttentionSublayer", {"positions": ints(0, 1, 0, 1, -1)}, "positions is -1"),
    ("PackedAttentionSublayer", {"positions": None}, "positions is missing"),
    ("PackedAttentionSublayer", {"rotary_table": normal(4)}, "rotary_table has 1 dimensions"),
    (
        "PackedAttentionSublayer",
        {"num_heads": 16, "bias_table": None, "slopes": None, "rotary_table": normal(4, 1)},
        "rotary_table is 1; it must be even",
    ),
]
_STATES: list[tuple[dict[str, Any], str]] = [
    ({"layer": 2}, "layer is 2"),
    ({"positions": ints(19, -1)}, "positions is -1"),
    ({"positions": ints(19)}, "positions is 1"),
    ({"offsets": ramp([1, 0])}, "offsets is 1"),
    ({"block_tables": ints(10_000, 1).reshape(2, 1)}, "block_tables is 10000"),
    ({"block_tables": ints(0, -1).reshape(2, 1)}, "block_tables is -1"),
    ({"block_tables": ints().reshape(2, 0)}, "width of block_tables is 0"),
    ({"block_tables": ints(0, 1).reshape(1, 2)}, "rows of block_tables is 1"),
    ({"cache": np.zeros((4, 2, 2, 1, 15), np.float16)}, "a layer in a block of cache is 60.* two states need 64"),
    ({"cache": np.zeros((4, 2, 2, 1, 16), np.int16)}, "cache must be float32 or float16"),
]
BAD += [("PagedAverage", changes, text) for changes, text in _STATES]
BAD_SUBLAYERS += [
    *(("SsruSublayer", changes, text) for changes, text in _STATES),
    ("SsruSublayer", {"gates_bias": normal(9)}, "gates_bias dimension 0 is 9"),
    ("SsruSublayer", {"residual": normal(1, 8)}, "residual is 1"),
    ("SsruSublayer", {"norm_weight": normal(9)}, "norm_weight is 9"),
]
BAD += [(prefix + name, changes, text) for prefix in NODE_PREFIXES.values() for name, changes, text in BAD_SUBLAYERS]


def run_changed(op_type: str, changes: dict[str, Any]) -> None:
    arrays, attributes = small_call(op_type)
    for name, value in changes.items():
        (attributes if name in attributes else arrays)[name] = value
    run_node(op_type, arrays, **attributes)


def test_every_kernel_is_called_with_bad_input() -> None:
    kernels = {node.name for operator in OPERATORS for node in operator.kernels()}
    assert kernels == NODES.keys() == {op_type for op_type, _, _ in BAD}


@pytest.mark.parametrize("op_type", NODES)
def test_valid_calls_succeed_before_they_are_changed(op_type: str) -> None:
    run_changed(op_type, {})


@pytest.mark.parametrize(
    "op_type",
    [*(name for name in SUBLAYERS if name[0] in "PS"), "PagedAverage", "DisentangledAttention", "PagedWrite", "Sample"],
)
def test_calls_without_rows_give_empty_outputs(op_type: str) -> None:
    kept: tuple[str, ...] = ("cache", "bias_table", "slopes", "rotary_table", "edit_ids", "edit_values")
    arrays, _ = small_call(op_type)
    kept += tuple(name for name in arrays if name.startswith("position_") or name.endswith(("weight", "bias")))
    empty = {name: array[:0] for name, array in arrays.items() if array is not None and name not in kept}
    offsets = "edit_offsets" if op_type == "Sample" else "offsets"
    run_changed(op_type, {**empty, offsets: ints(0)})


@pytest.mark.parametrize(("op_type", "changes", "message"), BAD, ids=[f"{op}-{next(iter(c))}" for op, c, _ in BAD])
def test_bad_input_is_refused_by_name_and_value(op_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=rf"antiphon\.{op_type}: .*{message}"):
        run_changed(op_type, changes)
    run_changed(op_type, {})


@pytest.mark.parametrize(
    ("op_type", "changes"),
    [
        ("Linear", {"x": normal(3, 8).astype(np.float64)}),
        ("QuantizedLinear", {"weight": pack_int8(normal(20, 8)).integers.view(np.uint8)}),
        ("PagedWrite", {"block_tables": np.zeros((2, 2), np.int64)}),
        ("Sample", {"int_params": np.zeros((2, len(INT_PARAMS)), np.int32)}),
    ],
)
def test_wrong_element_type_is_refused_when_the_graph_is_loaded(op_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=f"(?s)tensor.*{op_type}"):
        run_changed(op_type, changes)


ANY_INT = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40)


@settings(max_examples=150)
@given(st.data())
def test_random_lengths_and_tables_never_end_the_process(data: st.DataObject) -> None:
    """Random integers replace the small ones: the result is an answer or a refusal, and only the pool can change."""
    sublayers = [name for name in SUBLAYERS if name[0] in "PS"]
    op_type = data.draw(st.sampled_from([*sublayers, "PagedAverage", "DisentangledAttention", "PagedWrite"]))
    arrays, attributes = small_call(op_type)
    for name, array in arrays.items():
        if array is not None and array.dtype == np.int32 and data.draw(st.booleans()):
            drawn = data.draw(st.lists(ANY_INT, min_size=array.size, max_size=array.size))
            arrays[name] = np.array(drawn, np.int32).reshape(array.shape)
    held, guard = arrays.get("cache"), np.float32(7)
    if held is not None:
        roomy = np.full((held.shape[0] + 2, *held.shape[1:]), guard, held.dtype)
        roomy[1:-1] = held
        arrays["cache"] = roomy[1:-1]
    message = f"antiphon.{op_type}: "
    try:
        run_node(op_type, arrays, **attributes)
    except Exception as error:
        message = str(error)
    assert f"antiphon.{op_type}: " in message
    if held is not None:
        assert (roomy[[0, -1]] == guard).all()


@pytest.mark.combinations
@pytest.mark.parametrize("kernels", ["portable", "avx2", "avxvnni", "avx512", "amx", "dotprod", "i8mm"])
def test_kernels_of_every_processor_pass_the_same_tests(kernels: str) -> None:
    """Run the operators' tests again in a process with kernels that this processor would not choose."""
    asked = {**os.environ, "ANTIPHON_CPU": kernels}
    here = Path(__file__).parent
    probe = "from tests.parity.test_native_refusals import run_changed; run_changed('AddNorm', {})"
    root = here.parents[1]
    tried = subprocess.run([sys.executable, "-c", probe], env=asked, cwd=root, capture_output=True, text=True)
    if tried.returncode and "ANTIPHON_CPU" in tried.stderr:
        pytest.skip(tried.stderr.strip().splitlines()[-1])
    files = [here / f"test_native_{name}.py" for name in ("ops", "sample", "tiles")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *files], env=asked, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
