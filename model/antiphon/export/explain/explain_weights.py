"""Sharing of weights between the explain graph and the bundle's other graphs, so that a bundle stores them once.

A product's constant is replaced by the tensor as those graphs store it, and by plain ONNX nodes that compute [K, O]
float32 from it:

    plain  float32  unchanged                        int8  s8 [K, O], scales [O]
    native float32  [Op / 16, K, 16]                  int8  s8 [Op / 16, Kp / 4, 16, 4], scales [Op]   (packing.py)

Only those rows of an embedding are unpacked that are read. WeightsFile then finds that the tensors are already stored.

Axes: O outputs (V of an embedding), K inputs (M of an embedding), N ids.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from antiphon.bundle.manifest import Precision
from antiphon.export.graphs.graph_edit import Editor, constant_array, operand, shape_of, take_over
from antiphon.export.weights.packing import PANEL, pack_float, pack_int8
from antiphon.export.weights.quantize import quantize_rows

Layout = Literal["native", "plain"]

_FLOAT = int(ir.DataType.FLOAT)
_TOKEN_IDS = ("source_ids", "target_ids")  # token types are embedded too, by a table that is not packed


def store_as(model: ir.Model, layout: Layout, precision: Precision) -> None:
    """Change an explain graph in place so that it reads weights in the form of this layout and precision."""
    if (layout, precision) == ("plain", "float32"):
        return
    work = _Unpacker(model.graph, layout, precision)
    for node in list(model.graph):
        weight = constant_array(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.ndim == 2:  # tables of disentangled attention are multiplied too
            node.replace_input_with(1, work.product(node, weight))
        elif node.op_type == "Gather" and operand(node, 1).name in _TOKEN_IDS:
            table = constant_array(node.inputs[0])
            assert table is not None, f"{node.name}: embeddings are constants"
            take_over(node.outputs[0], work.embedding(node, table))
            model.graph.remove(node, safe=True)
    common_passes.RemoveUnusedNodesPass()(model)


class _Unpacker:
    """One pass over one graph that replaces weights by their stored form."""

    def __init__(self, graph: ir.Graph, layout: Layout, precision: Precision) -> None:
        self.edit = Editor(graph)
        self.layout = layout
        self.precision = precision

    def product(self, node: ir.Node, weight: NDArray[np.float32]) -> ir.Value:
        """Return the [K, O] float32 that `node` reads, computed from the stored form of weight [K, O]."""
        inputs, outputs = weight.shape
        if self.precision == "float32":
            packed = self.edit.constant(pack_float(weight.T))
            rows = self._reshaped(node, self._transposed(node, packed, 1, 0, 2), inputs, -1)
            return self._first(node, rows, outputs, axis=1, num_entries=-outputs % PANEL + outputs)
        if self.layout == "plain":
            integers, scales = quantize_rows(weight.T)
            return self._dequantized(node, self.edit.constant(np.ascontiguousarray(integers.T)), scales)
        stored = pack_int8(weight.T)
        depth, width = stored.integers.shape[1] * stored.integers.shape[3], len(stored.scales)
        rows = self._transposed(node, self.edit.constant(stored.integers), 1, 3, 0, 2)
        rows = self._first(node, self._reshaped(node, rows, depth, width), inputs, axis=0, num_entries=depth)
        return self._first(node, self._dequantized(node, rows, stored.scales), outputs, axis=1, num_entries=width)

    def embedding(self, node: ir.Node, table: NDArray[np.float32]) -> ir.Value:
        """Return the rows [1, N, M] float32 that `node` gathers, computed from the stored form of table [V, M]."""
        ids, width = operand(node, 1), table.shape[1]
        if self.precision == "float32":
            return self._from_panels(node, self.edit.constant(pack_float(table)), ids)
        if self.layout == "plain":
            integers, scales = quantize_rows(table)
            rows = self.edit.emit(node, "Gather", [self.edit.constant(integers), ids])
            return self._scaled(node, rows, scales, ids)
        stored = pack_int8(table)
        groups = self._from_panels(node, self.edit.constant(stored.integers), ids)  # [1, N, Kp / 4, 4]
        depth = stored.integers.shape[1] * stored.integers.shape[3]
        rows = self._first(node, self._reshaped(node, groups, 1, -1, depth), width, axis=2, num_entries=depth)
        return self._scaled(node, rows, stored.scales, ids)

    def _from_panels(self, node: ir.Node, packed: ir.Value, ids: ir.Value) -> ir.Value:
        """Gather the lane of each id from its panel: packed [Vp / 16, x, 16, ..] -> [1, N, x, ..]."""
        panel = self.edit.constant(np.array(PANEL, np.int64))
        panels = self.edit.emit(node, "Gather", [packed, self.edit.emit(node, "Div", [ids, panel])])
        panels = self._transposed(node, panels, 0, 1, 3, 2, *range(4, len(shape_of(packed)) + 1))  # [1, N, 16, x, ..]
        lanes = self.edit.emit(node, "Unsqueeze", [self.edit.emit(node, "Mod", [ids, panel]), self.edit.ints(-1)])
        return self.edit.emit(node, "GatherND", [panels, lanes], {"batch_dims": 2})

    def _scaled(self, node: ir.Node, rows: ir.Value, scales: NDArray[np.float32], ids: ir.Value) -> ir.Value:
        """Multiply integers [1, N, M] by the scale of each id."""
        steps = self.edit.emit(node, "Gather", [self.edit.constant(scales), ids])
        steps = self.edit.emit(node, "Unsqueeze", [steps, self.edit.ints(-1)])
        return self.edit.emit(node, "Mul", [self.edit.emit(node, "Cast", [rows], {"to": _FLOAT}), steps])

    def _dequantized(self, node: ir.Node, integers: ir.Value, scales: NDArray[np.float32]) -> ir.Value:
        return self.edit.emit(node, "DequantizeLinear", [integers, self.edit.constant(scales)], {"axis": 1})

    def _transposed(self, node: ir.Node, value: ir.Value, *axes: int) -> ir.Value:
        return self.edit.emit(node, "Transpose", [value], {"perm": list(axes)})

    def _reshaped(self, node: ir.Node, value: ir.Value, *shape: int) -> ir.Value:
        return self.edit.emit(node, "Reshape", [value, self.edit.ints(*shape)])

    def _first(self, node: ir.Node, value: ir.Value, size: int, *, axis: int, num_entries: int) -> ir.Value:
        """Return the first `size` of `num_entries` entries along an axis, without those that packing added."""
        if size == num_entries:
            return value
        return self.edit.emit(node, "Slice", [value, self.edit.ints(0), self.edit.ints(size), self.edit.ints(axis)])
