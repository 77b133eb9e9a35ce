"""Declaration of an operator: the one place that lists its inputs, attributes and outputs.

These parts are derived from an `Operator`: its PyTorch registration and fake, and its ONNX schema, both here; its
translation at export (`export/trace.py`), the packing of its weight (`export/weights.py`) and its documentation
(`python -m antiphon.ops.operators` prints it). The C++ kernels in `native/` register themselves; a test compares them
with the declarations. Declarations need neither PyTorch nor ONNX: the functions import them that need them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from onnxscript.values import Op
    from torch import Tensor

DOMAIN = "antiphon"
"""Name space of the operators in PyTorch, and their domain in ONNX."""
VERSION = 1
"""Version of the domain."""

Kind = Literal["float", "cache", "int64", "int32", "int8", "float16", "float32"]
"""Element type. "float" is the type of computation, float32 in the CPU kernels; "cache" is float32 or float16."""

Shape = Sequence[Any]
"""Sizes of the axes, ints or symbolic ints of PyTorch."""

NODE_PREFIXES = {"float32": "", "int8": "Quantized", "int4": "Nibble"}
"""Prefix of the name of the ONNX node that reads a packed weight, by precision of the weight."""


_ONNX_TYPES: dict[Kind, list[str]] = {
    "float": ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"],
    "cache": ["tensor(float)", "tensor(float16)"],
    "int64": ["tensor(int64)"],
    "int32": ["tensor(int32)"],
}


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
    """One constant of an operator. A bool is an int in ONNX.

    default: value of nodes without it; None: it is required.
    """

    name: str
    type: type[int] | type[float] | type[bool] | type[str]
    meaning: str
    default: float | None = None


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
    outliers: optional inputs at the end of the node, with integer weights, for inputs of the product that stay float32.
        Graphs that were exported before these inputs existed end before them.
    """

    name: str = "weight"
    sizes: tuple[str, ...]
    parts: Mapping[str, tuple[Input, ...]]
    outliers: tuple[Input, ...] = ()

    def inputs(self, precision: str) -> tuple[Input, ...]:
        """Return the inputs in place of the weight, with its prefix."""
        return self._prefixed(self.parts[precision])

    def outlier_inputs(self, precision: str) -> tuple[Input, ...]:
        """Return the inputs at the end of the node, with the weight's prefix."""
        return () if precision == "float32" else self._prefixed(self.outliers)

    def _prefixed(self, parts: Sequence[Input]) -> tuple[Input, ...]:
        prefix = self.name.removesuffix("weight")
        return tuple(replace(part, name=prefix + part.name) for part in parts)


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
    """

    name: str
    purpose: str
    inputs: tuple[Input, ...]
    attributes: tuple[Attribute, ...] = ()
    outputs: tuple[Output, ...]
    shapes: Callable[[Mapping[str, Any]], Sequence[Shape]]
    weights: tuple[PackedWeight, ...] = ()

    @property
    def node_name(self) -> str:
        """Return its name in ONNX, in camel case."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def updated_inputs(self) -> tuple[int, ...]:
        """Return the indices of the inputs that the ONNX node changes in place."""
        names = [port.name for port in self.inputs]
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
            inputs=(
                *(part for port in node.inputs for part in packed.get(port.name, (port,))),
                *(part for weight in self.weights for part in weight.outlier_inputs(precision)),
            ),
            attributes=(*node.attributes, *sizes),
        )

    def kernels(self) -> tuple[Node, ...]:
        """Return the signatures of all nodes for which the native library has a kernel."""
        if not self.weights:
            return (self.node(),)
        nodes = (self.packed_node(precision) for precision in NODE_PREFIXES)
        return tuple(node for node in nodes if node is not None)


def register(operator: Operator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the operator's eager implementation, and derive its fake.

    The function takes the inputs by position, the attributes by keyword, all under their declared names, and returns
    the outputs as contiguous tensors that share no memory with the inputs. It has no gradient: training uses another
    backend. Raises TypeError when its parameters differ from the declaration.
    """
    import torch

    def decorate(eager: Callable[..., Any]) -> Callable[..., Any]:
        _check_parameters(operator, eager)
        name, schema = f"{DOMAIN}::{operator.name}", torch_schema(operator)
        registered = torch.library.custom_op(name, eager, mutates_args=(), schema=schema)
        registered.register_fake(_fake(operator))
        return registered

    return decorate


def torch_schema(operator: Operator) -> str:
    """Return the signature in PyTorch's schema language."""
    inputs = [f"Tensor{'?' if port.optional else ''} {port.name}" for port in operator.inputs]
    attributes = [
        f"{attribute.type.__name__} {attribute.name}{_schema_default(attribute)}" for attribute in operator.attributes
    ]
    parameters = [*inputs, "*", *attributes] if attributes else inputs
    outputs = ", ".join("Tensor" for _ in operator.outputs)
    return f"({', '.join(parameters)}) -> {outputs if len(operator.outputs) == 1 else f'({outputs})'}"


def _schema_default(attribute: Attribute) -> str:
    """Return the default as PyTorch prints it: 0. for 0.0."""
    return "" if attribute.default is None else f"={attribute.default}".removesuffix("0")


def torch_operator(operator: Operator) -> torch._ops.OpOverload:
    """Return the registered operator as it appears in a traced graph."""
    import torch

    packet = getattr(getattr(torch.ops, DOMAIN), operator.name)
    overload: torch._ops.OpOverload = packet.default
    return overload


def onnx_operator(operator: Operator) -> Op:
    """Return the operator as onnxscript calls it."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    numbers = OpSchema.AttrType
    attribute_types = {int: numbers.INT, bool: numbers.INT, float: numbers.FLOAT, str: numbers.STRING}
    node = operator.node()
    ports: tuple[Input | Output, ...] = (*node.inputs, *node.outputs)
    kinds = {port.kind for port in ports}
    schema = OpSchema(
        node.name,
        DOMAIN,
        VERSION,
        inputs=[_parameter(port) for port in node.inputs],
        outputs=[_parameter(port) for port in node.outputs],
        type_constraints=[(kind, types, "") for kind, types in _ONNX_TYPES.items() if kind in kinds],
        attributes=[
            OpSchema.Attribute(attribute.name, attribute_types[attribute.type], "", required=attribute.default is None)
            for attribute in node.attributes
        ],
    )
    return Op(Opset(DOMAIN, VERSION), node.name, schema)


def _check_parameters(operator: Operator, eager: Callable[..., Any]) -> None:
    parameters = inspect.signature(eager).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    inputs = [port.name for port in operator.inputs]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):  # it receives all further inputs
        inputs = inputs[: len(names)]
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    attributes = [attribute.name for attribute in operator.attributes]
    if (names, keywords) != (inputs, attributes):
        raise TypeError(
            f"{operator.name}: its function takes {names} and keywords {keywords}; it must take {inputs} and keywords"
            f" {attributes}, as declared"
        )


def _fake(operator: Operator) -> Callable[..., Any]:
    """Return the function that PyTorch calls for shapes and types while it traces."""
    names = [port.name for port in operator.inputs]

    def infer(*operands: Tensor | None, **_attributes: object) -> Tensor | tuple[Tensor, ...]:
        inputs = dict(zip(names, operands, strict=True))
        shapes = operator.shapes(inputs)
        results = [_empty(operator, inputs, *pair) for pair in zip(operator.outputs, shapes, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    return infer


def _empty(operator: Operator, inputs: Mapping[str, Tensor | None], output: Output, shape: Shape) -> Tensor:
    """Return a tensor of the type of the first input of the output's kind."""
    like = next(inputs[port.name] for port in operator.inputs if port.kind == output.kind)
    assert like is not None, f"{operator.name}: the first input of kind {output.kind} must not be optional"
    return like.new_empty(tuple(shape))


def _parameter(port: Input | Output) -> Any:
    from onnx.defs import OpSchema

    option = OpSchema.FormalParameterOption
    is_optional = isinstance(port, Input) and port.optional
    return OpSchema.FormalParameter(
        port.name, port.kind, param_option=option.Optional if is_optional else option.Single
    )
