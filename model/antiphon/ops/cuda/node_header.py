"""C++ header of the nodes for GPUs, written from their declarations before the native library is compiled.

    python -m antiphon.ops.cuda.node_header FILE

For each node and element type the header has a struct with its ports, its attributes, its inputs and, for each kernel,
a function that puts the values of a launch in the order of the parameters. Reading the inputs refuses sizes that differ
from the declared axes: a number, the attribute that is a letter, an axis with the same text before it, or a product
such as `3 H D`, which also gives the size of its only unknown letter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from antiphon.ops.cuda.nodes import (
    ACTIVATIONS,
    BLOCK,
    HEAD_WIDTHS,
    MAX_PARTS,
    NODES,
    VOCABULARY_PART,
    CudaNode,
    Kernel,
    Parameter,
)
from antiphon.ops.operator import Attribute, Input, Kind, Output

_ELEMENTS: Mapping[Kind, str] = {
    "float": "T",
    "cache": "T",
    "int32": "kInt32",
    "int64": "kInt64",
    "float32": "kFloat32",
}
_TYPES = {int: "int64_t", float: "float", bool: "bool", str: "std::string"}


def node_header() -> str:
    """Return the text of the header."""
    activations = ", ".join(f'"{name}"' for name in ACTIVATIONS)
    widths = ", ".join(map(str, HEAD_WIDTHS))
    return "\n".join(
        [
            "// Written by model/antiphon/ops/cuda/node_header.py from the declarations in nodes.py.",
            "#pragma once",
            '#include "cuda_operator.h"',
            "namespace antiphon {",
            f"constexpr int64_t kHeadWidths[] = {{{widths}}};",
            f"constexpr int64_t kBlockColumns = {BLOCK}, kVocabularyPart = {VOCABULARY_PART}, kMaxParts = {MAX_PARTS};",
            f"constexpr const char* kActivations[] = {{{activations}}};",
            *(line for node in NODES for line in _struct(node)),
            "}  // namespace antiphon",
            "",
        ]
    )


def _struct(node: CudaNode) -> Iterator[str]:
    inputs = ", ".join(_port(port) for port in node.inputs)
    kernels = ", ".join(f'{{"{kernel.name}", "{node.signature(kernel)}"}}' for kernel in node.kernels)
    yield f"template <ElementType T> struct {node.name}Node {{"
    yield "static constexpr ElementType kElement = T;"
    yield f'static constexpr const char* kName = "{node.name}";'
    yield f"static constexpr Port kInputs[] = {{{inputs}}};"
    yield f"static constexpr Port kOutputs[] = {{{', '.join(_port(output) for output in node.outputs)}}};"
    yield f"static constexpr KernelSignature kKernels[] = {{{kernels}}};"
    yield "struct Settings {"
    reads = ", ".join(f"{attribute.name}({_read(attribute)})" for attribute in node.attributes)
    yield f"explicit Settings(const Attributes& from) {f': {reads} ' if reads else ''}{{ (void)from; }}"
    yield from (f"{_TYPES[attribute.type]} {attribute.name};" for attribute in node.attributes)
    yield "};"
    yield from _inputs(node)
    for kernel in node.kernels:
        yield from _launch(node, kernel)
    yield "};"


def _port(port: Input | Output) -> str:
    is_optional = isinstance(port, Input) and port.optional
    return f"{{{_ELEMENTS[port.kind]}{', kOptional' if is_optional else ''}}}"


def _read(attribute: Attribute) -> str:
    """Return the expression that reads an attribute; numbers of something are at least 1."""
    name = attribute.name
    if attribute.type is int:
        return f'from.{"Size" if name.startswith("num_") else "Int"}("{name}")'
    return {float: f'from.Float("{name}")', bool: f'from.Int("{name}") != 0', str: f'from.String("{name}")'}[
        attribute.type
    ]


def _inputs(node: CudaNode) -> Iterator[str]:
    reads = (
        f'{port.name}(call.{"OptionalInput" if port.optional else "Input"}({index}, "{port.name}",'
        f" {len(port.axes.split(', '))}))"
        for index, port in enumerate(node.inputs)
    )
    yield "struct Inputs {"
    yield f"Inputs(const Call& call, const Settings& settings) : {', '.join(reads)} {{ (void)settings;"
    letters, statements = _checks(node)
    yield from statements
    yield "}"
    yield f"Tensor {', '.join(port.name for port in node.inputs)};"
    yield f"int64_t {', '.join(letters)};"
    yield "};"


def _checks(node: CudaNode) -> tuple[list[str], list[str]]:
    """Return the letters whose sizes are known, and the statements that set them and refuse other sizes."""
    axes = [(port, index, text) for port in node.inputs for index, text in enumerate(port.axes.split(", "))]
    known = {attribute.meaning: f"settings.{attribute.name}" for attribute in node.attributes}
    letters: list[str] = []
    statements: list[str] = []

    def define(letter: str, size: str) -> None:
        known[letter] = letter
        letters.append(letter)
        statements.append(f"{letter} = {size};")

    defining = set()
    for port, index, text in axes:
        if re.fullmatch("[A-Za-z]", text) and text not in known and not port.optional:
            define(text, f"{port.name}.dims[{index}]")
            defining.add((port.name, index))
    for port, index, text in axes:
        axis, factors = f"{port.name}.dims[{index}]", text.split()
        unknown = [factor for factor in factors if factor not in known and not factor.isdigit()]
        if (port.name, index) in defining:
            continue
        if text in known:
            size = known[text]
        elif (base := text.removesuffix(" + 1")) in known:
            size = f"{known[base]} + 1"
        elif all(re.fullmatch("[0-9]+|[A-Z]", factor) for factor in factors) and len(unknown) <= (not port.optional):
            for letter in unknown:
                divisor = " * ".join(known.get(factor, factor) for factor in factors if factor != letter)
                define(letter, f"{axis} / std::max<int64_t>({divisor}, 1)")
            size = " * ".join(known.get(factor, factor) for factor in factors)
        else:
            known |= {} if port.optional else {text: axis}
            continue
        statements.append(f'RequireSize("{port.name}", {port.name}, {index}, {size});')
    return letters, statements


def _launch(node: CudaNode, kernel: Kernel) -> Iterator[str]:
    """Yield the function that lists the values of a launch; what is neither input nor attribute is its argument."""
    inputs = {port.name for port in node.inputs}
    numbers = {attribute.name for attribute in node.attributes if attribute.type in (int, float)}
    parameters, arguments, values = node.parameters(kernel), ["const Settings& settings", "const Inputs& in"], []
    for parameter in parameters:
        if parameter.name in inputs:
            values.append(f"in.{parameter.name}.data")
        elif parameter.name in numbers:
            values.append(f"settings.{parameter.name}")
        elif parameter.name == "flags":
            values.append(f"Flags({{{', '.join(_flag(flag, inputs) for flag in kernel.flags)}}})")
        else:
            arguments.append(f"{_argument_type(parameter)} {parameter.name}")
            values.append(parameter.name)
    function = "".join(word.capitalize() for word in kernel.name.split("_"))
    yield f"static KernelCall<{len(parameters)}> {function}({', '.join(arguments)}) {{ (void)settings; (void)in;"
    yield f'return {{"{kernel.name}", {{{", ".join(values)}}}}}; }}'


def _argument_type(parameter: Parameter) -> str:
    return "int64_t" if parameter.port is None else "const void*"


def _flag(flag: str, inputs: set[str]) -> str:
    name, is_compared, value = flag.partition("=")
    if is_compared:
        return f'settings.{name} == "{value}"'
    return " && ".join(f"bool(in.{part})" if part in inputs else f"settings.{part}" for part in flag.split("&"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(node_header(), encoding="ascii")
