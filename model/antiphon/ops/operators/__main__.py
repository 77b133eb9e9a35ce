"""Documentation of the operators, written from their declarations.

    python -m antiphon.ops.operators docs/OPERATORS.md

rewrites the part of that file that follows MARKER. A test compares the file with the declarations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.ops.operator import NODE_PREFIXES, Input, Operator, Output
from antiphon.ops.operators import OPERATORS

MARKER = "<!-- Everything below is written by model/antiphon/ops/operators/__main__.py. -->\n"


def document(operators: Sequence[Operator]) -> str:
    """Return one section for each operator."""
    return "\n".join("\n".join(_section(operator)) + "\n" for operator in operators)


def rewrite(path: Path) -> None:
    """Replace the text after MARKER in the file."""
    written, marker, _ = path.read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise ValueError(f"{path} has no line {MARKER.strip()!r}")
    path.write_text(f"{written}{marker}\n{document(OPERATORS)}", encoding="utf-8")


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
        yield f"| attribute | `{attribute.name}` | {attribute.type.__name__} | | {attribute.meaning} |"
    for output in operator.outputs:
        yield _row("output", output, _in_place(output))
    for precision in NODE_PREFIXES:
        yield from _packed(operator, precision)


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


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
