"""ModelStreamInfer: deltas that add up to the answer, one final response per request, errors of a single request."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.oip import inference_pb2 as oip
from antiphon.oip.inference_pb2_grpc import GRPCInferenceServiceStub
from antiphon.rpc.oip import stream as oip_stream
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID
from tests.oip import ids_request, num_cancelled, oip_stub, tensors, text_request
from tests.serving import MODEL_NAME, SOURCE, Gate, Serving, asking_whole, details_of, serving, stub_of
from tests.waits import comes_true

ENDS_CALL = (("triton_grpc_error", "true"),)
BAD = {"top_k": -1}


async def conversation(
    served: Serving, *requests: oip.ModelInferRequest, **call: Any
) -> dict[str, list[oip.ModelStreamInferResponse]]:
    """Return the responses of one call, by the id of their request."""
    by_id: dict[str, list[oip.ModelStreamInferResponse]] = defaultdict(list)
    async for response in oip_stub(served).ModelStreamInfer(iter(requests), **call):
        by_id[response.infer_response.id].append(response)
    return by_id


def is_final(response: oip.ModelStreamInferResponse) -> bool:
    return response.infer_response.parameters["triton_final_response"].bool_param


def joined(responses: list[oip.ModelStreamInferResponse]) -> tuple[str, list[int], list[str]]:
    """Return text and ids of all deltas, and every finish reason."""
    found = [tensors(response.infer_response) for response in responses]
    ids = [token_id for delta in found for token_id in delta["output_ids"][0]]
    return "".join(delta["text_output"][0] for delta in found), ids, [delta["finish_reason"][0] for delta in found]


async def test_requests_of_a_stream_are_answered_concurrently_in_deltas() -> None:
    sources = {"a": (9, 30, 31), "b": (12, 200, 100), "c": (4, 40)}
    async with serving() as served:
        requests = [ids_request(ids, id=name, model_name=MODEL_NAME) for name, ids in sources.items()]
        answers = await conversation(served, *requests)
        whole = {name: await stub_of(served).GenerateUnary(asking_whole(ids)) for name, ids in sources.items()}
    assert answers.keys() == sources.keys()
    for name, responses in answers.items():
        text, ids, reasons = joined(responses)
        expected = whole[name].outputs[0]
        assert (text, ids) == (expected.text, list(expected.token_ids))
        assert reasons == [""] * (len(responses) - 1) + ["stop"]
        assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]
        counted = responses[-1].infer_response.parameters["generated_tokens"].int64_param
        assert counted == whole[name].usage.generated_tokens


async def test_outputs_of_a_stream_are_distinguished_by_their_index() -> None:
    options: dict[str, Any] = dict(beam_width=3, num_return_sequences=2)
    async with serving() as served:
        (responses,) = (await conversation(served, ids_request(SOURCE, parameters=options))).values()
        whole = await stub_of(served).GenerateUnary(asking_whole(**options))
    by_output: dict[int, list[oip.ModelStreamInferResponse]] = defaultdict(list)
    for response in responses:
        by_output[response.infer_response.parameters["output_index"].int64_param].append(response)
    assert {index: joined(parts)[0] for index, parts in by_output.items()} == {
        output.output_index: output.text for output in whole.outputs
    }
    assert [is_final(response) for response in responses].count(True) == 1


async def test_error_of_a_request_ends_only_that_request() -> None:
    async with serving() as served:
        answers = await conversation(
            served,
            text_request("x", id="range", parameters=BAD),
            text_request("x", "y", id="batch"),
            text_request("x", id="model", model_name="other"),
            ids_request(SOURCE, id="good"),
        )
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert joined(answers.pop("good"))[1] == expected
    errors = {name: response.error_message for name, (response,) in answers.items()}
    assert all(is_final(response) for (response,) in answers.values())
    assert errors.keys() == {"range", "batch", "model"}
    assert "parameters.top_k is -1" in errors["range"]
    assert "one text in a stream" in errors["batch"]
    assert "'other' is not served" in errors["model"]


async def test_error_ends_the_call_with_its_status_when_the_client_requests_it() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        stream = oip_stub(served).ModelStreamInfer(metadata=ENDS_CALL)
        await stream.write(ids_request(SOURCE, id="good"))
        await asyncio.to_thread(gate.reached.wait)
        await stream.write(text_request("x", id="bad", parameters=BAD))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        gate.open()
        await served.calls.wait_until_idle()
    assert num_cancelled(served) == 1
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (details_of(caught.value).reason, details_of(caught.value).field) == ("INVALID_FIELD", "parameters.top_k")


async def test_message_that_cannot_be_parsed_ends_the_call() -> None:
    async with serving() as served:
        raw: Any = served.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        stream = raw(iter([b"\xff\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert (caught.value.code(), details_of(caught.value).field) == (grpc.StatusCode.INVALID_ARGUMENT, "message")


async def test_cancelling_the_stream_cancels_its_requests() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        stream = oip_stub(served).ModelStreamInfer()
        for _ in range(3):
            await stream.write(ids_request(SOURCE))
        await asyncio.to_thread(gate.reached.wait)
        # Stream and requests.
        await comes_true(lambda: served.registry.get_sample_value("antiphon_grpc_server_in_flight") == 4)
        stream.cancel()
        await served.calls.wait_until_idle()
        gate.open()
    assert num_cancelled(served) == 3


async def test_idle_stream_does_not_delay_a_drain() -> None:
    async with serving() as served:
        stream = oip_stub(served).ModelStreamInfer()
        await stream.write(ids_request(SOURCE))
        while not is_final(await stream.read()):
            pass
        await asyncio.wait_for(served.calls.wait_until_idle(), 60)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_stream_reads_no_message_beyond_its_limit_of_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip_stream, "MAX_OPEN_REQUESTS", 2)
    async with serving() as served:
        gate = Gate(served.runner)
        stream = oip_stub(served).ModelStreamInfer()
        for name in "abcd":
            await stream.write(ids_request(SOURCE, id=name))
        await stream.done_writing()
        await asyncio.to_thread(gate.reached.wait)
        await stub_of(served).GetModel(pb.GetModelRequest())
        busy = served.engine.num_running + served.engine.num_waiting
        gate.open()
        finals = [response.infer_response.id async for response in stream if is_final(response)]
    assert busy <= 2
    assert sorted(finals) == list("abcd")


async def test_each_request_of_a_stream_is_counted_and_logged_separately() -> None:
    async with serving() as served:
        await conversation(served, ids_request(SOURCE), text_request("x", parameters=BAD), ids_request((4, 40)))
        counted = {
            (sample.labels["method"].partition("/")[2], sample.labels["code"]): sample.value
            for metric in served.registry.collect()
            for sample in metric.samples
            if sample.name == "antiphon_grpc_server_handled_total" and sample.value
        }
    assert counted == {
        ("ModelStreamInfer:request", "OK"): 2,
        ("ModelStreamInfer:request", "INVALID_ARGUMENT"): 1,
        ("ModelStreamInfer", "OK"): 1,
    }


async def test_call_is_ended_when_its_client_reads_no_response() -> None:
    """Its flow-control window is as small as gRPC allows, so that the answers of a few requests overflow it."""
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
    async with (
        serving(slow_reader_timeout_s=0.3) as served,
        grpc.aio.insecure_channel(served.target, options=window) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer()
        for _ in range(32):
            await stream.write(ids_request((30, 30, 31)))
        assert await stream.read() is not grpc.aio.EOF
        async with asyncio.timeout(60):
            await served.calls.wait_until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(stream)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(caught.value).reason == "SLOW_READER"


async def read_to_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass
