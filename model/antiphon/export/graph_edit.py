"""Edits of an ONNX graph that the passes share: add constants and nodes, replace one value by another.

Does not know what operators compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Dim = int | ir.SymbolicDim


class Editor:
    """Adds nodes and constants to one graph; equal constants are stored once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def constant(self, array: NDArray[Any], name: str | None = None) -> ir.Value:
        """Return an initialiser that holds the array; a name that exists gets a suffix."""
        key = (str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).data).digest())
        if key not in self._constants:
            self._constants[key] = self._initializer(ir.tensor(array), name)
        return self._constants[key]

    def computed_constant(
        self, compute: Callable[[], NDArray[np.float32]], shape: Sequence[int], name: str
    ) -> ir.Value:
        """Return an initialiser whose numbers are computed at each read and not stored."""
        tensor = ir.LazyTensor(
            lambda: ir.tensor(compute()), dtype=ir.DataType.FLOAT, shape=ir.Shape(shape, frozen=True)
        )
        return self._initializer(tensor, name)

    def _initializer(self, tensor: ir.TensorProtocol, name: str | None) -> ir.Value:
        unique = name or f"constant_{len(self._constants)}"
        while unique in self.graph.initializers:
            unique += "_"
        tensor.name = unique
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=unique, shape=shape, type=ir.TensorType(tensor.dtype))
        value.const_value = tensor
        self.graph.register_initializer(value)
        return value

    def ints(self, *values: int) -> ir.Value:
        """Return a one-dimensional int64 constant."""
        return self.constant(np.array(values, np.int64))

    def emit(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | list[int]] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node of one output in front of `before`; returns that output."""
        return self.emit_many(before, op_type, inputs, attributes, 1, domain=domain)[0]

    def emit_many(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | list[int]] | None,
        num_outputs: int,
        *,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Insert a node in front of `before`, without trailing absent inputs; returns its outputs."""
        kept = list(inputs)
        while kept and kept[-1] is None:
            kept.pop()
        node = ir.node(op_type, kept, dict(attributes or {}), domain=domain, num_outputs=num_outputs)
        self.graph.insert_before(before, node)
        return node.outputs


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` in every reader and in the graph's outputs; `new` gets its shape, type and output name."""
    if new.shape is None:
        new.shape, new.type = old.shape, old.type
    if old.is_graph_output():
        new.name, old.name = old.name, f"{old.name}.before"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input that the node must have."""
    value = optional_operand(node, index)
    if value is None:
        raise ValueError(f"{node.op_type} {node.name} has no input {index}")
    return value


def optional_operand(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or None when it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def shape_of(value: ir.Value) -> tuple[Dim, ...]:
    """Return the value's dimensions, ints where static."""
    if value.shape is None:
        raise ValueError(f"{value.name} has no known shape")
    return tuple(value.shape)


def static_dim(value: ir.Value, axis: int) -> int:
    """Return one dimension, which must be static."""
    dim = shape_of(value)[axis]
    if not isinstance(dim, int):
        raise ValueError(f"{value.name}: dimension {axis} is {dim}, not a number")
    return dim


def constant_array(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the numbers of an initialiser, or None when the value is computed or absent."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()
