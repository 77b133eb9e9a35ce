"""Graph for an NVIDIA GPU under construction: products, nodes of ops/cuda/nodes.py, and weights of one element type.

A bias of a product is not added by the product: it stays with the product's value as a `State`, and the node that reads
the value adds it. Does not know what a Transformer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tensor_adapters import from_torch_dtype

from antiphon.export.graph_edit import constant_array, shape_of, static_dim
from antiphon.export.ports import Port
from antiphon.ops.cache_geometry import padded_width
from antiphon.ops.cuda import nodes
from antiphon.ops.operator import DOMAIN, Kind, Node

_ATTRIBUTES: Mapping[type, ir.AttributeType] = {
    int: ir.AttributeType.INT,
    bool: ir.AttributeType.INT,
    float: ir.AttributeType.FLOAT,
    str: ir.AttributeType.STRING,
}
_FIXED_TYPES: Mapping[Kind, ir.DataType] = {
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "float32": ir.DataType.FLOAT,
}


@dataclass(frozen=True, slots=True)
class State:
    """A computed value, and the bias that its readers must add; None: there is none."""

    value: ir.Value
    bias: ir.Value | None = None


class CudaGraph:
    """Nodes, weights, inputs and outputs of one graph; every weight is stored once and converted when it is written."""

    def __init__(self, inputs: Sequence[Port], element: ir.DataType) -> None:
        self.element = element
        self.inputs = {port.name: _input(port) for port in inputs}
        self._weights: dict[tuple[str, ir.DataType, int], ir.Value] = {}
        self._nodes: list[ir.Node] = []
        self._plain: dict[State, ir.Value] = {}

    def weight(self, traced: ir.Value, *, fill: float | None = None) -> ir.Value:
        """Return a weight of the traced graph in the graph's element type.

        fill: complete the first axis to a multiple of 16 with this number; None: keep the shape
        """
        shape = _shape(traced)
        rows = shape[0] if fill is None else padded_width(shape[0])

        def convert() -> NDArray[Any]:
            completed = np.full((rows, *shape[1:]), fill or 0, np.float32)
            completed[: shape[0]] = _numbers(traced)
            return completed.astype(self.element.numpy())

        return self._stored(traced, convert, (rows, *shape[1:]), self.element)

    def optional_weight(self, traced: ir.Value | None, *, fill: float | None = None) -> ir.Value | None:
        """Return the weight as `weight` does, or None where the traced node has none."""
        return None if traced is None else self.weight(traced, fill=fill)

    def table(self, traced: ir.Value | None) -> ir.Value | None:
        """Return a table that is float32 in every graph, or None where the traced node has none."""
        if traced is None:
            return None
        shape = _shape(traced)
        return self._stored(traced, lambda: _numbers(traced).astype(np.float32), shape, ir.DataType.FLOAT)

    def constant(self, name: str, numbers: NDArray[np.float32]) -> ir.Value:
        """Return a weight that the traced graph does not have, in the graph's element type."""
        key = (name, self.element, len(numbers))
        if key not in self._weights:
            self._weights[key] = self._initializer(name, ir.tensor(numbers.astype(self.element.numpy())))
        return self._weights[key]

    def product(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Add a product x weight^T, without bias, and return its value."""
        out = self._value(self.element)
        self._nodes.append(ir.node("Gemm", [x, weight], {"transB": 1}, outputs=[out]))
        return out

    def add(self, node: Node, inputs: Mapping[str, ir.Value | None], **attributes: Any) -> Sequence[ir.Value]:
        """Add a node of nodes.py, given its inputs and attributes by name, and return all its outputs."""
        names = [port.name for port in node.inputs]
        assert inputs.keys() <= set(names), f"{node.name} has no inputs {sorted(inputs.keys() - set(names))}"
        assert attributes.keys() == {attribute.name for attribute in node.attributes}, (
            f"{node.name}: {sorted(attributes)}"
        )
        values = [inputs.get(name) for name in names]
        while values[-1] is None:
            values.pop()
        constants = [
            ir.Attr(declared.name, _ATTRIBUTES[declared.type], declared.type(attributes[declared.name]))
            for declared in node.attributes
        ]
        outputs = [self._value(_FIXED_TYPES.get(output.kind, self.element)) for output in node.outputs]
        self._nodes.append(ir.Node(DOMAIN, node.name, values, constants, outputs=outputs))
        return outputs

    def activate(self, state: State, *, activation: str = "none", gated: bool = False) -> ir.Value:
        """Add the activation of a product with its bias."""
        inputs = {"x": state.value, "bias": state.bias}
        return self.add(nodes.ACTIVATE, inputs, activation=activation, gated=gated)[0]

    def plain(self, state: State) -> ir.Value:
        """Return a state with its bias added, for readers that add none."""
        if state not in self._plain:
            self._plain[state] = state.value if state.bias is None else self.activate(state)
        return self._plain[state]

    def finish(self, outputs: Mapping[str, ir.Value], ports: Sequence[Port], traced: ir.Model) -> ir.Model:
        """Return the model with these outputs, which must be those of the ports."""
        assert list(outputs) == [port.name for port in ports], f"{list(outputs)} differ from {ports}"
        for port in ports:
            value = outputs[port.name]
            value.name, value.shape, value.type = port.name, ir.Shape(port.axes), _type(port)
        graph = ir.Graph(
            list(self.inputs.values()),
            list(outputs.values()),
            nodes=self._nodes,
            initializers=list(self._weights.values()),
            opset_imports={"": traced.opset_imports[""], DOMAIN: traced.opset_imports[DOMAIN]},
            name=traced.graph.name,
        )
        return ir.Model(graph, ir_version=traced.ir_version)

    def _value(self, element: ir.DataType) -> ir.Value:
        """Return a value without shape: ONNX Runtime would keep equal shapes in one buffer for too long."""
        return ir.Value(type=ir.TensorType(element))

    def _stored(
        self, traced: ir.Value, convert: Callable[[], NDArray[Any]], shape: Sequence[int], element: ir.DataType
    ) -> ir.Value:
        assert traced.name is not None
        key = (traced.name, element, shape[0])
        if key not in self._weights:
            tensor = ir.LazyTensor(
                lambda: ir.tensor(convert(), dtype=element), dtype=element, shape=ir.Shape(shape, frozen=True)
            )
            self._weights[key] = self._initializer(traced.name, tensor)
        return self._weights[key]

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        taken = {weight.name for weight in self._weights.values()}
        while name in taken:
            name += "_"
        tensor.name = name
        return ir.Value(
            name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )


def _input(port: Port) -> ir.Value:
    return ir.Value(name=port.name, shape=ir.Shape(port.axes), type=_type(port))


def _type(port: Port) -> ir.TensorType:
    return ir.TensorType(from_torch_dtype(port.dtype))


def _shape(traced: ir.Value) -> tuple[int, ...]:
    """Return the shape of a weight."""
    return tuple(static_dim(traced, axis) for axis in range(len(shape_of(traced))))


def _numbers(traced: ir.Value) -> NDArray[Any]:
    """Return the numbers of a weight."""
    numbers = constant_array(traced)
    assert numbers is not None, f"{traced.name} is not a weight"
    return numbers
