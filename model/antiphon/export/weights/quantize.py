"""Quantisation to int8 of an exported float32 graph: every product with a constant weight, and the token embeddings.

Weights: one scale for each output column, symmetric. Activations: one scale for each row, computed at run time:

    x [.., K] -> Abs -> ReduceMax -> * 1/127 = step [.., 1]
    QuantizeLinear(x, step, 128), one block a row = q [.., K] uint8
    MatMulIntegerToFloat(q, W) [.., N] -> * step

The integer sums are exact and each row has its own scale, so a row's result cannot depend on the rows around it. One
scale for the whole tensor (DynamicQuantizeMatMul) would make it depend on them. uint8 times int8 is the pair with fast
kernels on x86. A row of zeros divides 0 by 0; the resulting integer does not matter, since step = 0 multiplies it.
Norms, biases, positions and attention stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from antiphon.export.graphs.graph_edit import Editor, constant_array, shape_of, static_dim, take_over

CONTRIB = "com.microsoft"
_LEVELS = 127
_ROWS = 4096
_SAME = 1e-4  # of a step: float32 rounds 127 steps to 1e-5


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor quantised row by row: integers [.., K], the integer that represents 0, and the steps [.., 1]."""

    integers: ir.Value
    zero: int
    step: ir.Value


def quantize(model: ir.Model) -> None:
    """Quantise the model's products and embeddings in place."""
    work = _Quantizer(model.graph)
    for node in list(model.graph):
        if node.op_type in ("MatMul", "Gemm"):
            work.product(node)
        elif node.op_type == "Gather":
            work.embedding(node)
    model.graph.opset_imports[CONTRIB] = 1
    common_passes.RemoveUnusedNodesPass()(model)


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise weight [N, K] to integers [N, K] in -127..127 and scales [N]; weight ~ integers * scales[:, None].

    Rows of multiples of their largest number / 126 keep these integers: old CTranslate2 converters truncated, current
    ones round.
    """
    integers, scales = np.empty(weight.shape, np.int8), np.empty(len(weight), np.float32)
    for begin in range(0, len(weight), _ROWS):  # in parts: embeddings are large
        rows = slice(begin, begin + _ROWS)
        integers[rows], scales[rows], errors = _rounded(weight[rows], _LEVELS)
        kept, kept_scales, kept_errors = _rounded(weight[rows], _LEVELS - 1)
        fits = (kept_errors < _SAME) & (errors >= _SAME)
        integers[rows][fits], scales[rows][fits] = kept[fits], kept_scales[fits]
    return integers, scales


def _rounded(
    weight: NDArray[np.float32], levels: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """Return integers [N, K], scales [N], and the largest error of each row [N] in steps."""
    largest = np.abs(weight).max(axis=1)
    scale = np.where(largest > 0, largest / levels, 1.0).astype(np.float32)
    steps = weight / scale[:, None]
    integers = np.rint(steps)
    return integers.astype(np.int8), scale, np.abs(steps - integers).max(axis=1)


class _Quantizer:
    """One pass over one graph; a tensor that several products read is quantised once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.edit = Editor(graph)
        self.rows: dict[int, _Rows] = {}
        self.zero_points: dict[str, ir.Value] = {}

    def product(self, node: ir.Node) -> None:
        """Quantise a MatMul or Gemm with a constant matrix; other products do not change."""
        activation, weight = node.inputs[0], constant_array(node.inputs[1])
        if activation is None or weight is None or weight.ndim != 2:
            return
        transposed = node.op_type == "Gemm" and bool(node.attributes["transB"].as_int())
        integers, scale = quantize_rows(weight if transposed else weight.T)
        rows = self._quantized(activation, node)
        if transposed:
            # Stored untransposed, since an embedding can share it; the runtime transposes it once, when it loads.
            matrix = self.edit.emit(node, "Transpose", [self.edit.constant(integers)], {"perm": [1, 0]})
        else:
            matrix = self.edit.constant(np.ascontiguousarray(integers.T))
        one, zero = self.edit.constant(np.array(1, np.float32)), self.edit.constant(np.array(rows.zero, np.uint8))
        inputs = [rows.integers, matrix, one, self.edit.constant(scale), zero]
        out = self.edit.emit(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB)
        out = self.edit.emit(node, "Mul", [out, rows.step])
        if node.op_type == "Gemm" and len(node.inputs) > 2:
            out = self.edit.emit(node, "Add", [out, node.inputs[2]])
        take_over(node.outputs[0], out)
        self.edit.graph.remove(node, safe=True)

    def embedding(self, node: ir.Node) -> None:
        """Quantise a Gather of token vectors; other tables do not change."""
        table, ids = constant_array(node.inputs[0]), node.inputs[1]
        if table is None or table.ndim != 2 or ids is None or not ids.is_graph_input():
            return
        integers, scale = quantize_rows(table)
        out, factor = node.outputs[0], np.float32(1)
        scaled = _only_reader(out, "Mul")
        if scaled is not None and (constant := _scalar(scaled.inputs[1])) is not None:
            out, factor = scaled.outputs[0], constant
        vectors = self.edit.emit(node, "Gather", [self.edit.constant(integers), ids])
        vectors = self.edit.emit(node, "Cast", [vectors], {"to": int(ir.DataType.FLOAT)})
        scales = self.edit.emit(node, "Gather", [self.edit.constant((scale * factor)[:, None]), ids])
        take_over(out, self.edit.emit(node, "Mul", [vectors, scales]))

    def _quantized(self, value: ir.Value, node: ir.Node) -> _Rows:
        if id(value) not in self.rows:
            self.rows[id(value)] = self._quantize(value, node)
        return self.rows[id(value)]

    def _quantize(self, value: ir.Value, node: ir.Node) -> _Rows:
        producer = value.producer()
        positive = producer is not None and producer.op_type == "Relu"
        # Numbers that are never negative need no Abs and use all 256 levels.
        levels, zero = (255, 0) if positive else (_LEVELS, 128)
        size = value if positive else self.edit.emit(node, "Abs", [value])
        largest = self.edit.emit(node, "ReduceMax", [size, self.edit.ints(-1)], {"keepdims": 1})
        step = self.edit.emit(node, "Mul", [largest, self.edit.constant(np.array(1 / levels, np.float32))])
        zeros = None if positive else self._zero_points(value, step, node)
        attributes = {"axis": -1, "block_size": static_dim(value, -1)}
        integers = self.edit.emit(node, "QuantizeLinear", [value, step, zeros], attributes)
        return _Rows(integers, zero, step)

    def _zero_points(self, value: ir.Value, step: ir.Value, node: ir.Node) -> ir.Value:
        """Return 128 for each row, shaped like the steps; activations with the same rows share the tensor."""
        rows = str(shape_of(value)[:-1])
        if rows not in self.zero_points:
            shape = self.edit.emit(node, "Shape", [step])
            middle = self.edit.constant(np.array(128, np.uint8))
            self.zero_points[rows] = self.edit.emit(node, "Expand", [middle, shape])
        return self.zero_points[rows]


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = value.consumers()
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _scalar(value: ir.Value | None) -> np.float32 | None:
    array: NDArray[Any] | None = constant_array(value)
    return np.float32(array.item()) if array is not None and array.size == 1 else None
