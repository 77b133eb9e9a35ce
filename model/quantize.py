"""int8: every product with a constant weight, and the token embeddings, of an exported float32 graph.

Weights: one scale for each output column, symmetric. Activations: one scale for each row, found as it runs:

    x [.., K] -> Abs -> ReduceMax = m [.., 1]
    x / m -> QuantizeLinear = q [.., K] uint8
    MatMulIntegerToFloat(q, W) [.., N] -> * m

The integer sums are exact and the scales are the row's own, so a row's result cannot depend on the rows around it;
one scale for the whole tensor (DynamicQuantizeMatMul) would break that. uint8 times int8 is the pair with fast kernels
on x86. A row of zeros divides 0 by 0: whatever integer that becomes is multiplied by m = 0 again. Norms, biases,
positions and attention stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from antiphon.model.ops.graph_edit import Editor, constant_array, take_over

CONTRIB = "com.microsoft"
_LEVELS = 127


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor quantised row by row: integers, what to multiply results by, and how to read the integers."""

    integers: ir.Value
    row_max: ir.Value
    step: ir.Value
    zero_point: ir.Value


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
    """weight [N, K] -> integers [N, K] in -127..127 and scales [N], weight ~ integers * scales[:, None]."""
    largest = np.abs(weight).max(axis=1)
    scale = np.where(largest > 0, largest / _LEVELS, 1.0).astype(np.float32)
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


class _Quantizer:
    """One pass over one graph; a tensor that several products read is quantised once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.edit = Editor(graph)
        self.rows: dict[int, _Rows] = {}

    def product(self, node: ir.Node) -> None:
        """MatMul or Gemm with a constant matrix; other products are left alone."""
        activation, weight = node.inputs[0], constant_array(node.inputs[1])
        if activation is None or weight is None or weight.ndim != 2:
            return
        transposed = node.op_type == "Gemm" and bool(node.attributes["transB"].as_int())
        integers, scale = quantize_rows(weight if transposed else weight.T)
        rows = self._quantized(activation, node)
        if transposed:
            # Stored as it lies, for an embedding may share it; the runtime transposes it once, when it loads.
            matrix = self.edit.emit(node, "Transpose", [self.edit.constant(integers)], {"perm": [1, 0]})
        else:
            matrix = self.edit.constant(np.ascontiguousarray(integers.T))
        inputs = [rows.integers, matrix, rows.step, self.edit.constant(scale), rows.zero_point]
        out = self.edit.emit(node, "MatMulIntegerToFloat", inputs, domain=CONTRIB)
        out = self.edit.emit(node, "Mul", [out, rows.row_max])
        if node.op_type == "Gemm" and len(node.inputs) > 2:
            out = self.edit.emit(node, "Add", [out, node.inputs[2]])
        take_over(node.outputs[0], out)
        self.edit.graph.remove(node, safe=True)

    def embedding(self, node: ir.Node) -> None:
        """Gather of token vectors; tables indexed by anything but the input's ids are left alone."""
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
        # What is never negative needs no Abs, and has all 256 levels to itself.
        levels, zero = (255, 0) if positive else (_LEVELS, 128)
        size = value if positive else self.edit.emit(node, "Abs", [value])
        row_max = self.edit.emit(node, "ReduceMax", [size, self.edit.ints(-1)], {"keepdims": 1})
        unit = self.edit.emit(node, "Div", [value, row_max])
        step = self.edit.constant(np.array(1 / levels, np.float32))
        zero_point = self.edit.constant(np.array(zero, np.uint8))
        integers = self.edit.emit(node, "QuantizeLinear", [unit, step, zero_point])
        return _Rows(integers, row_max, step, zero_point)


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = value.consumers()
    return readers[0] if len(readers) == 1 and readers[0].op_type == op_type else None


def _scalar(value: ir.Value | None) -> np.float32 | None:
    array: NDArray[Any] | None = constant_array(value)
    return np.float32(array.item()) if array is not None and array.size == 1 else None
