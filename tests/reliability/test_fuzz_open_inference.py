"""Random messages of the Open Inference Protocol: each request gets one final response or one refusal."""

import struct
from collections.abc import Iterator, Set
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from antiphon.engine.engine import Engine
from antiphon.oip import inference_pb2 as oip
from antiphon.v1 import inference_pb2 as pb
from tests.reliability.answers import REFUSALS
from tests.reliability.background import Background
from tests.reliability.test_fuzz_messages import NUM_EXAMPLES, PATIENCE_S, fuzzed
from tests.reliability.wire import messages
from tests.serving import MODEL_NAME, serving

pytestmark = pytest.mark.hardship

METHODS = {method.name: method for method in oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
# The protocol's parameter `timeout` ends a request like a deadline.
ENDS = REFUSALS | {grpc.StatusCode.DEADLINE_EXCEEDED}
PARAMETERS = [field.name for field in pb.GenerateOptions.DESCRIPTOR.fields] + ["priority", "timeout", "nonsense"]

Served = tuple[grpc.Channel, Engine]


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with Background(serving) as server, grpc.insecure_channel(server.served.target) as channel:
        yield channel, server.served.engine


def _parameters() -> SearchStrategy[dict[str, oip.InferParameter]]:
    numbers = st.one_of(st.integers(-3, 40), st.sampled_from([2**62, -(2**63)]))
    values = st.one_of(
        st.booleans().map(lambda value: oip.InferParameter(bool_param=value)),
        numbers.map(lambda value: oip.InferParameter(int64_param=value)),
        st.floats().map(lambda value: oip.InferParameter(double_param=value)),
        st.sampled_from(["[1, 2]", "[[", '{"3": 1.5}', '{"3": "x"}', "[" * 5000, "a", "", "NaN", "[1e400]"]).map(
            lambda value: oip.InferParameter(string_param=value)
        ),
        st.just(oip.InferParameter()),
    )
    return st.dictionaries(st.sampled_from(PARAMETERS), values, max_size=3)


def _tensors() -> SearchStrategy[tuple[oip.ModelInferRequest.InferInputTensor, bytes | None]]:
    """Return an input and, if it has no typed contents, its raw contents; sometimes they do not match."""
    texts = st.sampled_from([b"the cat", b"", b"\xff", "日本".encode(), b"x" * 4000])
    names = st.sampled_from(["text_input", "text_input", "text_input", "input_ids", "text_pair", "other", ""])
    shapes = st.sampled_from([[1], [1], [1, 1], [1, 3], [0], [-1], [2], [], [2**62, 2**62], [1, 2**40]])

    def made(name: str, text: bytes, shape: list[int], kind: str, is_raw: bool) -> Any:
        tensor = oip.ModelInferRequest.InferInputTensor(name=name, datatype=kind, shape=shape)
        if is_raw:
            return tensor, struct.pack("<I", len(text)) + text
        tensor.contents.bytes_contents.append(text)
        if name == "input_ids":
            tensor.contents.int64_contents.extend([9, 30, 31])
        return tensor, None

    kinds = st.sampled_from(["BYTES", "BYTES", "BYTES", "INT64", "FP32", "STRING", ""])
    return st.builds(made, names, texts, shapes, kinds, st.booleans())


def _requests() -> SearchStrategy[oip.ModelInferRequest]:
    def made(
        tensors: list[tuple[Any, bytes | None]],
        parameters: dict[str, oip.InferParameter],
        name: str,
        output: str | None,
    ) -> oip.ModelInferRequest:
        request = oip.ModelInferRequest(model_name=name, inputs=[tensor for tensor, _ in tensors], id="7")
        request.raw_input_contents.extend(raw for _, raw in tensors if raw is not None)
        for key, value in parameters.items():
            request.parameters[key].CopyFrom(value)
        if output is not None:
            request.outputs.add(name=output)
        return request

    names = st.sampled_from([MODEL_NAME, MODEL_NAME, MODEL_NAME, "", "nobody"])
    outputs = st.sampled_from([None, None, "text_output", "embedding", "nothing"])
    return st.builds(made, st.lists(_tensors(), max_size=2), _parameters(), names, outputs)


def _serialised(method: MethodDescriptor) -> SearchStrategy[bytes]:
    anything = messages(method.input_type)
    if method.input_type.name != "ModelInferRequest":
        return anything
    return st.one_of(anything, *[_requests().map(lambda request: request.SerializeToString())] * 3)


def check_end(error: Any, ends: Set[grpc.StatusCode] = ENDS) -> None:
    assert error.code() in ends, f"{error.code()}: {error.details()}"


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"ModelStreamInfer"}))
def test_random_messages_get_one_answer_or_one_refusal(fake: Served, name: str) -> None:
    channel, engine = fake
    method = METHODS[name]
    parse = GetMessageClass(method.output_type).FromString
    ask: Any = channel.unary_unary(f"/{method.containing_service.full_name}/{name}", response_deserializer=parse)

    @fuzzed(NUM_EXAMPLES * (2 if name == "ModelInfer" else 1))
    @given(_serialised(method))
    def holds(data: bytes) -> None:
        try:
            ask(data, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            check_end(error)

    holds()
    assert (engine.num_running, engine.num_free_blocks) == (0, engine.num_blocks)


def test_random_requests_of_a_stream_get_one_final_response_each(fake: Served) -> None:
    channel, engine = fake
    method = METHODS["ModelStreamInfer"]
    parse = oip.ModelStreamInferResponse.FromString
    ask: Any = channel.stream_stream(
        f"/{method.containing_service.full_name}/{method.name}", response_deserializer=parse
    )

    @fuzzed(NUM_EXAMPLES)
    @given(st.lists(_serialised(method), max_size=4))
    def holds(data: list[bytes]) -> None:
        try:
            responses = list(ask(iter(data), timeout=PATIENCE_S))
        except grpc.RpcError as error:
            if all(map(_is_message, data)):
                raise
            check_end(error, REFUSALS)
            return
        last = [one for one in responses if one.infer_response.parameters["triton_final_response"].bool_param]
        assert len(last) == len(data)
        assert all(one in last for one in responses if one.error_message)

    holds()
    assert (engine.num_running, engine.num_free_blocks) == (0, engine.num_blocks)


def _is_message(data: bytes) -> bool:
    try:
        oip.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    return True
