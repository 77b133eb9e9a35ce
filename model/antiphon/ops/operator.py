"""Declaration of an operator: the one place that lists its inputs, attributes and outputs.

These parts are derived from an `Operator`: its PyTorch registration and fake (`torch_registration.py`), its ONNX schema
(`onnx_schema.py`), its translation at export (`export/graphs/translation.py`), the packing of its weight
(`export/weights/packing.py`) and its entry in docs/OPERATORS.md (`operator_table.py`). The C++ kernels in `native/`
register themselves; a test compares them with the declarations. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

DOMAIN = "antiphon"
"""Name space of the operators in PyTorch, and their domain in ONNX."""

Kind = Literal["float", "cache", "int64", "int32", "int8", "float16", "float32"]
"""Element type. "float" is the type of computation, float32 in the CPU kernels; "cache" is float32 or float16."""

Shape = Sequence[Any]
"""Sizes of the axes, ints or symbolic ints of PyTorch."""

NODE_PREFIXES = {"float32": "", "int8": "Quantized", "int4": "Nibble"}
"""Prefix of the name of the ONNX node that reads a packed weight, by precision of the weight."""


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor that an operator reads. axes: letters as in the module's docstring, separated by commas."""

    name: str
    kind: Kind
    axes: str
    meaning: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Attribute:
    """One constant of an operator, required. A bool is an int in ONNX."""

    name: str
    type: type[int] | type[float] | type[bool] | type[str]
    meaning: str


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that an operator returns.

    updates: name of an input; this output is a changed copy of it. The PyTorch operator returns the copy. The ONNX node
    changes the input in place and does not have this output.
    """

    name: str
    kind: Kind
    axes: str
    meaning: str
    updates: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """Layouts in which export stores an input of an operator that is a weight.

    name: name of the input: "weight", or with a prefix that the names of the parts get too.
    sizes: attributes that packing adds to the node: the weight's outputs, then its inputs, before padding.
    parts: by precision, the inputs of the node in place of the weight. A precision that is missing has no kernel.
    """

    name: str = "weight"
    sizes: tuple[str, ...]
    parts: Mapping[str, tuple[Input, ...]]

    def inputs(self, precision: str) -> tuple[Input, ...]:
        """Return the inputs in place of the weight, with its prefix."""
        prefix = self.name.removesuffix("weight")
        return tuple(replace(part, name=prefix + part.name) for part in self.parts[precision])


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Signature of an ONNX node: that of an operator, or of an operator with packed weights."""

    name: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of this project.

    name: its name in PyTorch, in snake case.
    purpose: its result, in one sentence, with the paper that defines it.
    shapes: rule that returns the shape of every output, given the inputs by name.
    weights: layouts of its weights, which have the same precisions.
    has_kernel: False where the export replaces the operator by one of ONNX Runtime's own.
    """

    name: str
    purpose: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...] = ()
    outputs: tuple[Output, ...]
    shapes: Callable[[Mapping[str, Any]], Sequence[Shape]]
    weights: tuple[PackedWeight, ...] = ()
    has_kernel: bool = True

    @property
    def node_name(self) -> str:
        """Return its name in ONNX, in camel case."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def updated_inputs(self) -> tuple[int, ...]:
        """Return the indices of the inputs that the ONNX node changes in place."""
        names = [given.name for given in self.inputs]
        return tuple(names.index(output.updates) for output in self.outputs if output.updates is not None)

    def node(self) -> Node:
        """Return the signature of the ONNX node that the trace writes, with unpacked weights."""
        kept = tuple(output for output in self.outputs if output.updates is None)
        return Node(name=self.node_name, inputs=self.inputs, attributes=self.attributes, outputs=kept)

    def packed_node(self, precision: str) -> Node | None:
        """Return the signature of the node that reads packed weights; None if the precision has no kernel."""
        if not self.weights or any(precision not in weight.parts for weight in self.weights):
            return None
        node, packed = self.node(), {weight.name: weight.inputs(precision) for weight in self.weights}
        names = (name for weight in self.weights for name in weight.sizes)
        sizes = (Attribute(name, int, "size of the weight before it is padded") for name in names)
        return replace(
            node,
            name=NODE_PREFIXES[precision] + node.name,
            inputs=tuple(part for given in node.inputs for part in packed.get(given.name, (given,))),
            attributes=(*node.attributes, *sizes),
        )

    def kernels(self) -> tuple[Node, ...]:
        """Return the signatures of all nodes for which the native library has a kernel."""
        if not self.has_kernel:
            return ()
        if not self.weights:
            return (self.node(),)
        nodes = (self.packed_node(precision) for precision in NODE_PREFIXES)
        return tuple(node for node in nodes if node is not None)
