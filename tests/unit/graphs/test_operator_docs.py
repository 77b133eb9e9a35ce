"""The printed documentation and the native library agree with the declarations of the operators."""

from __future__ import annotations

import ctypes
from dataclasses import fields

import pytest
import torch

from antiphon.ops.operator import Attribute, Input, Kind, Node, Operator, Output, register, torch_operator, torch_schema
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.__main__ import document
from antiphon.ops.operators.sample import PARAMS
from antiphon.ops.sampling import Samples, SamplingArrays
from antiphon.ops.shared_inputs import SAMPLES
from antiphon.ops.workspace import LIBRARY

# ONNXTensorElementDataType; a cache is of any type, which the kernel checks.
ELEMENTS: dict[Kind, int] = {"cache": 0, "float": 1, "int8": 3, "int32": 6, "int64": 7, "float16": 10}


def signature(node: Node) -> str:
    """Return the native library's line that describes a node."""
    inputs = [f"{ELEMENTS[given.kind]}{'?' if given.optional else ''}" for given in node.inputs]
    return " ".join([node.name, *inputs, "->", *(str(ELEMENTS[output.kind]) for output in node.outputs)])


def test_documentation_names_every_input_attribute_and_output() -> None:
    for operator in OPERATORS:
        section = document([operator])
        assert f"\n## {operator.node_name}\n" in section
        names = [part.name for parts in (operator.inputs, operator.attributes, operator.outputs) for part in parts]
        assert [name for name in names if f"`{name}`" not in section] == []


def test_kernels_of_the_native_library_equal_the_declared_ones() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    library.antiphon_operators.restype = ctypes.c_char_p
    registered = library.antiphon_operators().decode().splitlines()
    assert sorted(registered) == sorted(signature(node) for each in OPERATORS for node in each.kernels())


def test_operators_are_registered_with_pytorch_as_declared() -> None:
    for operator in OPERATORS:
        schema = str(torch_operator(operator)._schema)
        assert schema == f"antiphon::{operator.name}{torch_schema(operator)}"


def test_sample_is_declared_with_the_fields_of_its_arrays() -> None:
    assert [given.name for given in PARAMS] == [field.name for field in fields(SamplingArrays)]
    assert [output.name for output in SAMPLES] == [field.name for field in fields(Samples)]


def test_function_with_other_parameters_than_declared_is_refused() -> None:
    twice = Operator(
        name="twice",
        purpose="2 x.",
        inputs=(Input("x", "float", "N", "numbers"),),
        attributes=(Attribute("times", int, "a factor"),),
        outputs=(Output("out", "float", "N", "products"),),
        shapes=lambda given: [given["x"].shape],
    )

    def misnamed(y: torch.Tensor, *, times: int) -> torch.Tensor:
        return y * times

    with pytest.raises(
        TypeError, match=r"twice: its function takes \['y'\] and keywords \['times'\]; it must take \['x'\]"
    ):
        register(twice)(misnamed)
