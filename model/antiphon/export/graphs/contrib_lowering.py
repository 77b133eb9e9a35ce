"""Lowering `contrib`: replaces attention nodes by operators that are part of ONNX Runtime.

    Attention        -> com.microsoft::MultiHeadAttention; without a T x T buffer if there is no mask and no bias
    CachedAttention  -> com.microsoft::GroupQueryAttention over a shared buffer; with no new keys (cross attention)
                        an empty key and value leave the cache unchanged

This is a pass over the whole graph, because the operators take [B, T, H*D] operands, packed where possible, and small
inputs that all layers can share. Kernels differ between execution providers, so LOWERINGS has one function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from antiphon.errors import LoweringError
from antiphon.export.graphs.graph_edit import (
    Editor,
    constant_array,
    operand,
    optional_operand,
    shape_of,
    static_dim,
    take_over,
)
from antiphon.ops.operator import DOMAIN
from antiphon.ops.operators.fused_attention import ATTENTION, CACHED_ATTENTION

CONTRIB = "com.microsoft"


def lower_for_cpu(graph: ir.Graph) -> None:
    """Replace every attention node of the graph in place, for the CPU execution provider.

    Raises LoweringError, which names the node and the unsupported shape.
    """
    lowering = _Lowering(graph)
    for node in list(graph):
        if node.domain == DOMAIN:
            lowering.replace(node)
    graph.opset_imports.pop(DOMAIN, None)
    graph.opset_imports[CONTRIB] = 1


LOWERINGS: dict[str, Callable[[ir.Graph], None]] = {"CPUExecutionProvider": lower_for_cpu}


class _Lowering:
    """One pass over one graph; keeps the small tensors that attention nodes share."""

    def __init__(self, graph: ir.Graph) -> None:
        self.edit = Editor(graph)
        self.shared: dict[tuple[str, str], ir.Value] = {}

    def replace(self, node: ir.Node) -> None:
        """Replace one attention node by the operator."""
        out = {ATTENTION.node_name: self._attention, CACHED_ATTENTION.node_name: self._cached_attention}[node.op_type](
            node
        )
        self._connect(node, out)
        self.edit.graph.remove(node, safe=True)

    def _attention(self, node: ir.Node) -> ir.Value:
        query, key, value = (operand(node, index) for index in range(3))
        lens, bias = (optional_operand(node, index) for index in (3, 4))
        causal = node.attributes["causal"].as_int()
        queries, keys = shape_of(query)[1], shape_of(key)[1]
        if causal and queries != keys:
            raise LoweringError(f"{node.name}: causal attention of {queries} queries over {keys} keys has no operator")
        joined = [self._joined(part, node) for part in (query, key, value)]
        projection_bias = self._take_bias(joined)
        attributes = {
            "num_heads": static_dim(query, 2),
            "scale": node.attributes["scale"].as_float(),
            "unidirectional": causal,
        }
        inputs = [*joined, projection_bias, lens, bias]
        return self.edit.emit(node, "MultiHeadAttention", inputs, attributes, domain=CONTRIB)

    def _take_bias(self, parts: list[ir.Value]) -> ir.Value | None:
        """Return the bias of the product that was split into query, key and value; the operator adds it."""
        split = parts[0].producer()
        if split is None or split.op_type != "Split" or list(split.outputs) != parts:
            return None
        added = operand(split, 0).producer()
        if added is None or added.op_type != "Add" or constant_array(added.inputs[1]) is None:
            return None
        split.replace_input_with(0, added.inputs[0])
        return added.inputs[1]

    def _cached_attention(self, node: ir.Node) -> ir.Value:
        query, key, value, cache_key, cache_value, lens = (operand(node, index) for index in range(6))
        queries, appended = shape_of(query)[1], shape_of(key)[1]
        if appended not in (0, 1) or (appended and queries != 1):
            raise LoweringError(f"{node.name}: appending {appended} keys a row to a ragged cache has no operator")
        if static_dim(query, 3) % 8:
            raise LoweringError(f"head_dim={static_dim(query, 3)} must be a multiple of 8 for cached attention")
        if appended:
            operands = self._packed((query, key, value), node)
        else:
            operands, lens = self._without_new_keys(query, node), self._minus_one(lens, node)
        heads = static_dim(query, 2)
        attributes = {
            "num_heads": heads,
            "kv_num_heads": heads,
            "scale": node.attributes["scale"].as_float(),
            # A single query sees every key in both cases, and only the causal kernel has a fast path.
            "causal": int(queries == 1),
        }
        total = self._capacity(cache_key, node)
        inputs = [*operands, cache_key, cache_value, lens, total, None, None, None, optional_operand(node, 6)]
        outputs = self.edit.emit_many(
            node, "GroupQueryAttention", inputs, attributes, 3 if appended else 1, domain=CONTRIB
        )
        for old, new in zip(node.outputs[1:], outputs[1:], strict=False):
            take_over(old, new)
        return outputs[0]

    def _packed(self, operands: Sequence[ir.Value], node: ir.Node) -> list[ir.Value | None]:
        """Return query, key and value as one tensor [B, T, 3*H*D] when one product computed them, else as three."""
        joined = [self._joined(part, node) for part in operands]
        split = joined[0].producer()
        if split is not None and split.op_type == "Split" and list(split.outputs) == joined:
            return [split.inputs[0], None, None]
        return list(joined)

    def _without_new_keys(self, query: ir.Value, node: ir.Node) -> list[ir.Value | None]:
        """Return operands without new keys: the query, and empty keys and values [B, 0, H*D] that layers share."""
        joined = self._joined(query, node)
        first, second = self.edit.ints(0), self.edit.ints(1)
        empty = self._once(
            ("empty", f"{shape_of(query)[0]} {static_dim(query, 2)}"),
            lambda: self.edit.emit(node, "Slice", [joined, first, first, second]),
        )
        return [joined, empty, empty]

    def _minus_one(self, lens: ir.Value, node: ir.Node) -> ir.Value:
        """Return lens - 1: GroupQueryAttention counts a row's keys without the last one."""
        one = self.edit.constant(np.array([1], np.int32))
        return self._once(("minus_one", f"{lens.name}"), lambda: self.edit.emit(node, "Sub", [lens, one]))

    def _capacity(self, cache: ir.Value, node: ir.Node) -> ir.Value:
        """Return the capacity of a row of the cache, [1] int32; layers with the same dimension share the tensor."""

        def build() -> ir.Value:
            length = self.edit.emit(node, "Shape", [cache], {"start": 2, "end": 3})
            return self.edit.emit(node, "Cast", [length], {"to": int(ir.DataType.INT32)})

        return self._once(("capacity", f"{shape_of(cache)[2]}"), build)

    def _once(self, key: tuple[str, str], build: Callable[[], ir.Value]) -> ir.Value:
        if key not in self.shared:
            self.shared[key] = build()
        return self.shared[key]

    def _joined(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """Join the heads, [B, T, H, D] -> [B, T, H*D]; returns the tensor before the split, if there is one."""
        width = static_dim(value, 2) * static_dim(value, 3)
        before = value.producer()
        if before is not None and before.op_type == "Reshape":
            source = before.inputs[0]
            if source is not None and source.shape is not None and len(source.shape) == 3:
                return source
        return self.edit.emit(node, "Reshape", [value, self.edit.ints(0, 0, width)])

    def _connect(self, node: ir.Node, out: ir.Value) -> None:
        """Connect `out` [B, T, H*D] to the node's readers, without a Reshape where they join the heads."""
        old = node.outputs[0]
        heads, width = static_dim(old, 2), static_dim(old, 3)
        out.shape, out.type = ir.Shape([*shape_of(old)[:2], heads * width]), old.type
        for use in list(old.consumers()):
            if use.op_type == "Reshape" and len(shape_of(use.outputs[0])) == 3:
                take_over(use.outputs[0], out)
                self.edit.graph.remove(use, safe=True)
        if old.consumers() or old.is_graph_output():
            split = self.edit.emit(node, "Reshape", [out, self.edit.ints(0, 0, heads, width)])
            take_over(old, split)
