"""The int8 pass: results of each row, and the parts of a graph that it does not change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from antiphon.bundle.exact_products import keep_products_exact
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.export.weights.quantize import quantize, quantize_rows

Floats = NDArray[np.float32]


def product(weight: Floats, *, relu: bool) -> Any:
    """Return a session of the quantised graph x -> [Relu ->] x W."""
    x = ir.val("x", ir.DataType.FLOAT, ["rows", weight.shape[0]])
    w = ir.Value(name="w", const_value=ir.tensor(weight), shape=ir.Shape(weight.shape))
    first = ir.node("Relu" if relu else "Identity", [x])
    first.outputs[0].shape, first.outputs[0].type = x.shape, x.type
    last = ir.node("MatMul", [first.outputs[0], w])
    last.outputs[0].name = "y"
    last.outputs[0].type = x.type
    graph = ir.Graph([x], last.outputs, nodes=[first, last], initializers=[w], opset_imports={"": 23}, name="product")
    model = ir.Model(graph, ir_version=10)
    quantize(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    keep_products_exact(options)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("relu", [False, True])
def test_product_equals_integer_arithmetic_in_numpy(relu: bool) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((64, 48), np.float32)
    x = random.standard_normal((5, 64), np.float32) * np.array([[1e-3], [1], [50], [1], [7]], np.float32)
    (found,) = product(weight, relu=relu).run(None, {"x": x})
    levels = 255 if relu else 127
    rows = np.maximum(x, 0) if relu else x
    step = np.abs(rows).max(axis=1, keepdims=True) * np.float32(1 / levels)
    integers, scale = quantize_rows(weight.T)
    sums = np.rint(rows / step).astype(np.int32) @ integers.T.astype(np.int32)
    np.testing.assert_allclose(found, sums * scale * step, rtol=1e-6, atol=0)


@pytest.mark.parametrize("relu", [False, True])
def test_product_of_a_row_of_zeros_is_zero(relu: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 48), np.float32)
    x = np.stack([np.zeros(64, np.float32), np.ones(64, np.float32)])
    (found,) = product(weight, relu=relu).run(None, {"x": x})
    np.testing.assert_array_equal(found[0], 0)
    assert np.isfinite(found).all()


def test_product_of_a_row_does_not_depend_on_its_neighbours() -> None:
    random = np.random.default_rng(0)
    session = product(random.standard_normal((256, 128), np.float32), relu=False)
    x = random.standard_normal((37, 256), np.float32) * random.uniform(0.01, 100, (37, 1)).astype(np.float32)
    (together,) = session.run(None, {"x": x})
    alone = np.concatenate([session.run(None, {"x": row[None]})[0] for row in x])
    np.testing.assert_array_equal(together, alone)


def test_quantize_rows_keeps_each_weight_within_half_a_step() -> None:
    weight = np.random.default_rng(0).standard_normal((7, 33), np.float32)
    weight[3] = 0
    integers, scale = quantize_rows(weight)
    assert np.abs(integers.astype(int)).max() == 127
    assert (np.abs(integers * scale[:, None] - weight) <= scale[:, None] * 0.5001).all()


def operators(bundle: Bundle, part: str, precision: Precision) -> Counter[str]:
    graphs = bundle.graph_set(precision, "contrib")
    return Counter(node.op_type for node in ir.load(bundle.file(getattr(graphs, part))).graph)


def test_int8_graphs_quantise_every_product_and_each_tensor_once(bundle: Bundle) -> None:
    for part in ("encoder", "decoder"):
        exact, coarse = operators(bundle, part, "float32"), operators(bundle, part, "int8")
        assert coarse["MatMulIntegerToFloat"] == exact["MatMul"] + exact["Gemm"]
        assert not coarse["MatMul"] + coarse["Gemm"]
    # Both layers' cross-attention projections read the same memory.
    assert operators(bundle, "encoder", "int8")["QuantizeLinear"] == 2 * 4 + 1


def test_decoder_graphs_contain_no_layout_operators(bundle: Bundle) -> None:
    held = operators(bundle, "decoder", "float32")
    assert held["GroupQueryAttention"] == 4
    assert not held["Transpose"] + held["Reshape"] + held["Split"] + held["Concat"]


def test_tied_embedding_is_stored_once(bundle: Bundle) -> None:
    config = bundle.manifest.model
    table = config.vocab_size * config.d_model
    products = config.encoder_layers * (4 * config.d_model**2 + 2 * config.d_model * config.d_ff)
    products += config.decoder_layers * (8 * config.d_model**2 + 2 * config.d_model * config.d_ff)
    positions = 4 * config.d_model * (config.max_source_len + config.max_target_len)
    for layout in ("plain", "native"):
        held = bundle.manifest.files[f"weights.{layout}.int8.bin"].size
        assert table + products < held < 1.1 * (table + products) + positions + 20_000
