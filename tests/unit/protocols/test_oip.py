"""The Open Inference Protocol over a real channel: the answers of antiphon.v1, and errors that name its own fields."""

import asyncio
import contextlib
import re
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from antiphon.domain.errors import AntiphonError, InvalidArgument
from antiphon.domain.limits import EngineLimits
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.oip.inference import MAX_BATCH
from antiphon.rpc.oip.parameters import read_parameters
from antiphon.rpc.oip.tensors import Tensor, read_inputs, write_outputs
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID, FakeClock
from tests.oip import ids_request, infer_request, num_cancelled, oip_stub, tensors, text_request
from tests.serving import MODEL_NAME, SOURCE, Gate, asking_whole, details_of, refusal, serving, stub_of

TEXTS = ("the cat", "a mat on the mat", "x")
SAMPLED: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_new_tokens": 12}


def of_output(output: pb.Output) -> tuple[str, list[int], int, str]:
    reason = pb.FinishReason.Name(output.finish_reason).removeprefix("FINISH_REASON_").lower()
    return output.text, list(output.token_ids), len(output.token_ids), reason


@pytest.mark.parametrize("is_typed", [False, True])
async def test_batch_of_texts_gets_the_answers_of_each_text_alone(is_typed: bool) -> None:
    async with serving() as served:
        options = pb.GenerateOptions(**SAMPLED)
        alone = [await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(text=t, options=options)) for t in TEXTS]
        request = text_request(*TEXTS, parameters=SAMPLED, id="7", is_typed=is_typed)
        response = await oip_stub(served).ModelInfer(request)
    found = tensors(response)
    rows = zip(found["text_output"], found["output_ids"], found["sequence_length"], found["finish_reason"], strict=True)
    cut = [(text, ids[:length], length, reason) for text, ids, length, reason in rows]
    assert cut == [of_output(answer.outputs[0]) for answer in alone]
    assert (response.id, response.model_name, response.model_version) == ("7", MODEL_NAME, "1")
    counted = {name: value.int64_param for name, value in response.parameters.items()}
    assert counted == {
        "source_tokens": sum(answer.usage.source_tokens for answer in alone),
        "generated_tokens": sum(answer.usage.generated_tokens for answer in alone),
    }


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32"])
@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("leading", [(), (1,)])
async def test_token_ids_are_answered_with_token_ids(datatype: str, is_typed: bool, leading: tuple[int, ...]) -> None:
    async with serving() as served:
        inputs = {"input_ids": (datatype, (*leading, len(SOURCE)), SOURCE)}
        response = await oip_stub(served).ModelInfer(infer_request(inputs, ["output_ids"], is_typed=is_typed))
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert tensors(response) == {"output_ids": [expected]}


async def test_outputs_have_the_requested_order_and_the_shape_of_the_batch() -> None:
    async with serving() as served:
        column = {"text_input": ("BYTES", (2, 1), [b"the cat", b"x"])}
        wanted = ["finish_reason", "text_output"]
        found = tensors(await oip_stub(served).ModelInfer(infer_request(column, wanted)))
        sampled = infer_request(column, ["text_output"], parameters=SAMPLED | {"num_return_sequences": 3})
        several = tensors(await oip_stub(served).ModelInfer(sampled))["text_output"]
        options = pb.GenerateOptions(**SAMPLED, num_return_sequences=3)
        alone = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(text="the cat", options=options))
    assert list(found) == wanted
    assert [len(row) for row in found["text_output"]] == [1, 1]
    assert [len(row) for row in several] == [3, 3]
    assert several[0] == [output.text for output in alone.outputs]


PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers": ({"max_new_tokens": 4, "temperature": 2, "seed": 5}, dict(max_new_tokens=4, temperature=2.0, seed=5)),
    "beams": (
        {"beam_width": 3, "num_return_sequences": 2, "early_stopping": "first", "length_penalty": 0.5},
        dict(beam_width=3, num_return_sequences=2, early_stopping=pb.EARLY_STOPPING_FIRST, length_penalty=0.5),
    ),
    "lists": (
        {"suppressed_ids": "[112, 26]", "stop_ids": 82, "prefix_ids": "[5, 6]"},
        dict(suppressed_ids=[112, 26], stop_ids=[82], prefix_ids=pb.TokenIds(ids=[5, 6])),
    ),
    "texts": ({"prefix_text": "the", "stop_strings": '["a", "7"]'}, dict(prefix_text="the", stop_strings=["a", "7"])),
    "map": ({"logit_bias": '{"40": 1e5}', "max_new_tokens": 3}, dict(logit_bias={40: 1e5}, max_new_tokens=3)),
    "flag": ({"ignore_eos": True}, dict(ignore_eos=True)),
}


@pytest.mark.parametrize("case", PARAMETERS)
async def test_parameters_have_the_effect_of_the_options_of_the_same_name(case: str) -> None:
    parameters, options = PARAMETERS[case]
    async with serving() as served:
        answer = await stub_of(served).GenerateUnary(asking_whole(**options))
        plain = await stub_of(served).GenerateUnary(asking_whole())
        found = tensors(await oip_stub(served).ModelInfer(ids_request(SOURCE, parameters=parameters)))
    expected = [of_output(output)[1] for output in answer.outputs]
    rows = found["output_ids"] if len(expected) == 1 else found["output_ids"][0]
    lengths = found["sequence_length"] if len(expected) == 1 else found["sequence_length"][0]
    assert [row[:length] for row, length in zip(rows, lengths, strict=True)] == expected
    assert expected != [list(plain.outputs[0].token_ids)]


REFUSED: dict[str, tuple[oip.ModelInferRequest, str, str]] = {
    "no input": (infer_request({}), "inputs", "either text_input or input_ids"),
    "both": (
        infer_request({"text_input": ("BYTES", (1,), [b"x"]), "input_ids": ("INT32", (1, 1), [5])}),
        "inputs",
        "either text_input or input_ids",
    ),
    "unknown input": (infer_request({"prompt": ("BYTES", (1,), [b"x"])}), "inputs", "of text_input, input_ids"),
    "unknown output": (text_request("x", outputs=["logits"]), "outputs", "text_output"),
    "outputs of two tasks": (text_request("x", outputs=["text_output", "embedding"]), "outputs", "embedding"),
    "no texts": (text_request(), "text_input.shape", f"n from 1 to {MAX_BATCH}"),
    "too many texts": (text_request(*["x"] * (MAX_BATCH + 1)), "text_input.shape", f"n from 1 to {MAX_BATCH}"),
    "square": (infer_request({"text_input": ("BYTES", (1, 2), [b"x", b"y"])}), "text_input.shape", "n, 1"),
    "numbers for text": (infer_request({"text_input": ("INT32", (1,), [7])}), "text_input.datatype", "BYTES"),
    "texts for numbers": (infer_request({"input_ids": ("BYTES", (1,), [b"7"])}), "input_ids.datatype", "INT32"),
    "two sources": (infer_request({"input_ids": ("INT32", (2, 1), [7, 8])}), "input_ids.shape", "one source"),
    "odd type": (
        oip.ModelInferRequest(
            inputs=[dict(name="input_ids", datatype="BF16", shape=[1])],  # type: ignore[list-item]
            raw_input_contents=[b"xx"],
        ),
        "input_ids.datatype",
        "one of BYTES",
    ),
    "too few": (infer_request({"input_ids": ("INT32", (1, 4), [7, 8])}), "input_ids", "4, as the shape"),
    "negative": (infer_request({"input_ids": ("INT64", (1, 2), [7, -8])}), "input_ids", "-8.* of 0 or more"),
    "outside": (ids_request((5, 280)), "input_ids", "280.* 0 to 279"),
    "negative shape": (infer_request({"input_ids": ("INT64", (1, -1), [7])}), "input_ids.shape", "0 or more"),
    "not utf-8": (infer_request({"text_input": ("BYTES", (1,), [b"\xff"])}), "text_input", "UTF-8"),
    "one of several": (text_request("x", "", "y"), r"text_input\[1\]", "empty"),
    "long": (text_request("x" * 100), "text_input", "1 to 32 tokens"),
    "range": (text_request("x", parameters={"top_p": 2.0}), "parameters.top_p", "at most 1"),
    "type": (text_request("x", parameters={"top_k": "many"}), "parameters.top_k", "a whole number"),
    "flag for number": (text_request("x", parameters={"top_k": True}), "parameters.top_k", "a whole number"),
    "number for flag": (text_request("x", parameters={"ignore_eos": 1}), "parameters.ignore_eos", "true or false"),
    "enum": (text_request("x", parameters={"early_stopping": "soon"}), "parameters.early_stopping", "first"),
    "enum's number": (text_request("x", parameters={"priority": 9}), "parameters.priority", "INTERACTIVE"),
    "not json": (text_request("x", parameters={"logit_bias": "5"}), "parameters.logit_bias", "JSON object"),
    "json of texts": (text_request("x", parameters={"stop_ids": '["a"]'}), "parameters.stop_ids", "JSON array"),
    "unknown": (text_request("x", parameters={"max_tokens": 5}), "parameters", "max_new_tokens"),
    "without a tensor": (text_request("x", parameters={"num_logprobs": 1}), "parameters", "num_return_sequences"),
    "timeout": (text_request("x", parameters={"timeout": -1}), "parameters.timeout", "microseconds"),
    "language": (text_request("x", parameters={"source_language": "de"}), "parameters.source_language", ""),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_request_names_the_tensor_or_parameter(case: str) -> None:
    request, field, message = REFUSED[case]
    async with serving() as served:
        error = await refusal(oip_stub(served).ModelInfer(request))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    found = details_of(error).field
    assert found is not None
    assert re.fullmatch(field, found), found
    assert re.search(message, error.details() or ""), error.details()


def long_named(length: int) -> dict[str, oip.ModelInferRequest]:
    """Return requests that are refused for a name of this length, by the status of the refusal."""
    name = "é" * length
    unknown = infer_request({name: ("BYTES", (2,), [b"x"])})
    shared, classified = text_request("x"), text_request("x")
    shared.inputs[0].parameters[f"shared_memory_{name}"].int64_param = 5
    classified.outputs.add(name=name).parameters["classification"].int64_param = 3
    return {"INVALID_ARGUMENT": unknown, "UNIMPLEMENTED": shared, "UNIMPLEMENTED ": classified}


@pytest.mark.parametrize("length", [200, 9000, 60_000])
async def test_refusal_of_a_long_name_arrives_with_its_status(length: int) -> None:
    """Trailers above 8 KiB made gRPC replace every status by RESOURCE_EXHAUSTED (grpc/grpc#37852)."""
    async with serving() as served:
        for status, request in long_named(length).items():
            error = await refusal(oip_stub(served).ModelInfer(request))
            assert error.code().name == status.strip(), error.details()
            assert details_of(error).reason in ("INVALID_FIELD", "UNSUPPORTED")


MALFORMED = {"cut length": b"\x05\x00", "cut text": b"\x05\x00\x00\x00abc", "huge": b"\xff\xff\xff\xffabc"}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
async def test_truncated_raw_texts_are_refused(content: bytes) -> None:
    request = text_request("x")
    request.raw_input_contents[0] = content
    async with serving() as served:
        error = await refusal(oip_stub(served).ModelInfer(request))
    assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "text_input")


async def test_raw_and_typed_elements_exclude_each_other_and_shared_memory_is_refused() -> None:
    both, fewer, shared = text_request("x"), text_request("x"), text_request("x")
    both.inputs[0].contents.bytes_contents.append(b"x")
    fewer.raw_input_contents.append(b"")
    shared.inputs[0].parameters["binary_data_size"].int64_param = 5  # parameters of kserve without effect here
    shared.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    async with serving() as served:
        errors = [await refusal(oip_stub(served).ModelInfer(request)) for request in (both, fewer, shared)]
    assert [details_of(error).field for error in errors] == ["text_input.contents", "raw_input_contents", None]
    assert [error.code().name for error in errors] == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "UNIMPLEMENTED"]


@pytest.mark.parametrize(("name", "version"), [("other", ""), (MODEL_NAME, "2")])
async def test_other_models_and_versions_are_not_found_and_not_ready(name: str, version: str) -> None:
    async with serving() as served:
        stub = oip_stub(served)
        error = await refusal(stub.ModelInfer(text_request("x", model_name=name, model_version=version)))
        assert (error.code(), details_of(error).reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert not (await stub.ModelReady(oip.ModelReadyRequest(name=name, version=version))).ready
        assert (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL_NAME, version="1"))).ready


async def test_readiness_and_liveness_equal_those_of_the_health_service() -> None:
    async with serving() as served:
        stub = oip_stub(served)
        health: Any = health_pb2_grpc.HealthStub(served.channel)

        async def seen() -> tuple[bool, bool, bool, bool]:
            own = await health.Check(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService"))
            return (
                (await stub.ServerLive(oip.ServerLiveRequest())).live,
                (await stub.ServerReady(oip.ServerReadyRequest())).ready,
                (await stub.ModelReady(oip.ModelReadyRequest(name=MODEL_NAME))).ready,
                own.status == health_pb2.HealthCheckResponse.SERVING,
            )

        at_first = await seen()
        await served.probes.leave()
        leaving = await seen()
        await served.probes.live(is_live=False)
        hanging = await seen()
    assert at_first == (True, True, True, True)
    assert leaving == (True, False, False, False)
    assert hanging == (False, False, False, False)


async def test_health_service_lists_the_status_of_every_service() -> None:
    """grpcio-health-checking declares List without implementing it (grpc/grpc#41991); it failed as INTERNAL."""
    messages: Any = health_pb2  # its type stubs lack List
    async with serving() as served:
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        await served.probes.leave()
        listed = (await health.List(messages.HealthListRequest())).statuses
        checked = {name: (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in listed}
    assert {name: check.status for name, check in listed.items()} == checked
    assert {"", "liveness", "inference.GRPCInferenceService", f"antiphon.v1.InferenceService/{MODEL_NAME}"} <= set(
        listed
    )
    assert len(set(checked.values())) == 2


async def test_reflection_answers_under_its_stable_name_as_under_the_old_one() -> None:
    """grpcio-reflection has only v1alpha (grpc/grpc#38576), and newer tools ask for v1 alone."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = []
    async with serving() as served:
        for version in ("v1alpha", "v1"):
            call: Any = served.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            answers.append([answer async for answer in call(iter([request]))])
    assert answers[0] == answers[1]
    assert "antiphon.v1.InferenceService" in {named.name for named in answers[1][0].list_services_response.service}


async def test_metadata_and_configuration_describe_the_input_and_output_tensors() -> None:
    async with serving() as served:
        stub = oip_stub(served)
        metadata = await stub.ModelMetadata(oip.ModelMetadataRequest())
        config = (await stub.ModelConfig(oip.ModelConfigRequest(name=MODEL_NAME))).config
        server = await stub.ServerMetadata(oip.ServerMetadataRequest())
        index = await stub.RepositoryIndex(oip.RepositoryIndexRequest())
        response = await stub.ModelInfer(text_request("the cat"))
        embedded = await stub.ModelInfer(text_request("the cat", outputs=["embedding"]))
    described = {tensor.name: (tensor.datatype, len(tensor.shape)) for tensor in metadata.outputs}
    given = {out.name: (out.datatype, len(out.shape)) for out in (*response.outputs, *embedded.outputs)}
    assert described == given
    assert {tensor.name for tensor in metadata.inputs} == {"text_input", "input_ids", "text_pair"}
    assert [tensor.name for tensor in config.output] == list(described)
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert config.model_transaction_policy.decoupled
    assert (server.name, set(server.extensions) >= {"parameters", "statistics"}) == ("antiphon", True)
    assert [(model.name, model.state) for model in index.models] == [(MODEL_NAME, "READY")]


async def test_statistics_count_requests_texts_and_failures() -> None:
    async with serving() as served:
        stub = oip_stub(served)
        empty = (await stub.ModelStatistics(oip.ModelStatisticsRequest())).model_stats
        await stub.ModelInfer(text_request(*TEXTS))
        call = stub.ModelStreamInfer(iter([text_request("the cat")]))
        assert [message async for message in call]
        await refusal(stub.ModelInfer(text_request("x", parameters={"top_k": -1})))
        (found,) = (await stub.ModelStatistics(oip.ModelStatisticsRequest(name=MODEL_NAME))).model_stats
    assert [(one.name, one.inference_count, one.last_inference) for one in empty] == [(MODEL_NAME, 0, 0)]
    times = found.inference_stats
    assert (times.success.count, times.fail.count, found.inference_count) == (2, 1, len(TEXTS) + 1)
    assert times.queue.count == times.compute_infer.count == len(TEXTS) + 1
    assert times.success.ns > 0 < times.compute_infer.ns
    assert found.last_inference > 0


async def test_first_error_of_a_batch_cancels_the_rest_of_it() -> None:
    async with serving(EngineLimits(max_queued_requests=2, max_num_seqs=1)) as served:
        error = await refusal(oip_stub(served).ModelInfer(text_request(*["the cat"] * 16)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error).retry_after_s is not None
        await served.calls.wait_until_idle()


async def test_timeout_in_microseconds_is_a_deadline() -> None:
    clock = FakeClock()
    async with serving(clock=clock) as served:
        gate = Gate(served.runner)
        call = oip_stub(served).ModelInfer(text_request("the cat", parameters={"timeout": 50_000}))
        await asyncio.to_thread(gate.reached.wait)
        clock.advance(0.06)
        gate.open()
        error = await refusal(call)
    assert (error.code(), details_of(error).reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_cancelling_the_call_cancels_every_text_of_it() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        call = oip_stub(served).ModelInfer(text_request(*TEXTS))
        await asyncio.to_thread(gate.reached.wait)
        call.cancel()
        await served.calls.wait_until_idle()
        gate.open()
    assert num_cancelled(served) == len(TEXTS)


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
