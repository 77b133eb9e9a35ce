"""Documentation of the operators, printed from their declarations: `python -m antiphon.ops.operators`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from antiphon.ops.operator import NODE_PREFIXES, Attribute, Input, Operator, Output
from antiphon.ops.operators import OPERATORS

_INTRODUCTION = """\
# Operators

Operators of the domain `antiphon`, of which exported graphs consist. Each has a reference in PyTorch and kernels in
C++ (`model/antiphon/ops/native`).

Types: `float` is float32 in the kernels; `cache` is float32 or float16, as the bundle stores keys and values.

Axes: N tokens of a step or of a batch, packed one behind another without padding; B sources or sequences; R rows of a
decoder step; X, Y widths of block tables; H heads; D head width, Dp is D rounded up to 16; L layers; M model width;
V vocabulary; F feed-forward width; K inputs and O outputs of a product, Kp is K rounded up to 64 and Op is O rounded
up to 16 (for the weight of `Embed`, O is V and K is M); P positions, or rows of a table of positions. In `Sample`, K
counts samples, F and I float and integer parameters, E edits and k candidates.

An optional input that is left out is an empty name in ONNX and None in PyTorch. Every attribute is required.

"""


def document(operators: Sequence[Operator]) -> str:
    """Return the introduction, and one section for each operator."""
    return _INTRODUCTION + "\n".join("\n".join(_section(operator)) + "\n" for operator in operators)


def _section(operator: Operator) -> Iterator[str]:
    yield f"## {operator.node_name}"
    yield ""
    yield operator.purpose
    yield ""
    yield f"In PyTorch: `antiphon::{operator.name}`. {_kernels(operator)}"
    yield ""
    yield "| | Name | Type | Axes | Meaning |"
    yield "|---|---|---|---|---|"
    for port in operator.inputs:
        yield _row("input", port, "; optional" if port.optional else "")
    for attribute in operator.attributes:
        kind, meaning = attribute.type.__name__, attribute.meaning + _default(attribute)
        yield f"| attribute | `{attribute.name}` | {kind} | | {meaning} |"
    for output in operator.outputs:
        yield _row("output", output, _in_place(output))
    for precision in NODE_PREFIXES:
        yield from _packed(operator, precision)


def _default(attribute: Attribute) -> str:
    return "" if attribute.default is None else f"; {attribute.default:g} where it is missing"


def _row(role: str, port: Input | Output, note: str) -> str:
    return f"| {role} | `{port.name}` | {port.kind} | [{port.axes}] | {port.meaning}{note} |"


def _in_place(output: Output) -> str:
    return f"; the node changes `{output.updates}` in place and has no such output" if output.updates else ""


def _kernels(operator: Operator) -> str:
    return "Native kernels: " + ", ".join(f"`{node.name}`" for node in operator.kernels()) + "."


def _packed(operator: Operator, precision: str) -> Iterator[str]:
    """Describe the inputs in place of the weights, and the attributes that packing adds."""
    node = operator.packed_node(precision)
    if node is None:
        return
    yield ""
    names = " and ".join(f"`{weight.name}`" for weight in operator.weights)
    sizes = ", ".join(f"`{name}`" for weight in operator.weights for name in weight.sizes)
    yield f"`{node.name}` ({precision}) has these inputs in place of {names}, and {sizes} as further attributes:"
    yield ""
    yield "| | Name | Type | Axes | Meaning |"
    yield "|---|---|---|---|---|"
    for weight in operator.weights:
        for part in weight.inputs(precision):
            yield _row("input", part, "")
        for part in weight.outlier_inputs(precision):
            yield _row("input", part, "; optional, behind all other inputs")


if __name__ == "__main__":
    print(document(OPERATORS), end="")
