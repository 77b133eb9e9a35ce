"""Reading of tensors and parameters: any input is read or refused, and written tensors read back unchanged."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.domain.errors import AntiphonError, InvalidArgument
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.oip.parameters import read_parameters
from antiphon.rpc.oip.tensors import Tensor, read_inputs, write_outputs
from antiphon.v1 import inference_pb2 as pb

DATATYPES = ("BYTES", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "FP16", "")
INTEGERS = {"INT32": (-(2**31), 2**31 - 1), "INT64": (-(2**63), 2**63 - 1), "UINT32": (0, 2**32 - 1)}
KINDS = (pb.GenerateUnaryRequest, pb.GenerateRequest, pb.ClassifyRequest, pb.EmbedRequest, pb.TagRequest)
NAMES = [field.name for field in pb.GenerateOptions.DESCRIPTOR.fields]
NAMES += ["priority", "timeout", "top_k", "pooling", "task", "source_language", "options", "text", "", "other"]

inputs = st.builds(
    oip.ModelInferRequest.InferInputTensor,
    name=st.sampled_from(("text_input", "input_ids", "x")),
    datatype=st.sampled_from(DATATYPES),
    shape=st.lists(st.one_of(st.integers(-2, 4), st.just(2**62)), max_size=9),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(("[", "[" * 5000, "[1e999]", "[1, []]", '{"1": {}}', '{"x": 1}', "null", "NaN", "first", "[null]")),
)
parameters = st.one_of(
    st.builds(oip.InferParameter, bool_param=st.booleans()),
    st.builds(oip.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1)),
    st.builds(oip.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    st.builds(oip.InferParameter, double_param=st.floats()),
    st.builds(oip.InferParameter, string_param=texts),
    st.just(oip.InferParameter()),
)


@given(st.lists(inputs, max_size=3), st.lists(st.binary(max_size=24), max_size=3))
def test_tensors_of_random_bytes_are_read_or_refused(given_inputs: list[Any], raws: list[bytes]) -> None:
    message = oip.ModelInferRequest(inputs=given_inputs, raw_input_contents=raws)
    with contextlib.suppress(AntiphonError):
        for tensor in read_inputs(message).values():
            assert tensor.name in {"text_input", "input_ids", "x"}


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), parameters, max_size=3))
def test_parameters_of_any_value_are_read_or_refused_by_name(kind: Any, asked: dict[str, Any]) -> None:
    field = None
    try:
        assert isinstance(read_parameters(kind, asked).message, kind)
    except InvalidArgument as error:
        field = error.field
    assert field in {None, "parameters", *(f"parameters.{name}" for name in asked)}


@given(st.data())
def test_written_tensors_are_equal_after_reading(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(("BYTES", *INTEGERS)))
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    element: Any = st.binary(max_size=5) if datatype == "BYTES" else st.integers(*INTEGERS[datatype])
    values = data.draw(st.lists(element, min_size=rows * columns, max_size=rows * columns))
    response = oip.ModelInferResponse()
    write_outputs(response, [Tensor("x", datatype, (rows, columns), values)])
    (output,) = response.outputs
    request = oip.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    request.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    assert list(read_inputs(request)["x"].values) == values


@pytest.mark.parametrize(("text", "value"), [("first", 2), ("EARLY_STOPPING_FIRST", 2), ("Never", 3)])
def test_enums_are_accepted_with_and_without_the_prefix_of_their_type(text: str, value: int) -> None:
    asked = read_parameters(pb.GenerateRequest, {"early_stopping": oip.InferParameter(string_param=text)})
    assert asked.message.options.early_stopping == value
