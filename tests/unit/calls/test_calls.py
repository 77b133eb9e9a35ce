"""Every RPC returns a request id in trailing metadata, and is counted exactly once, with any status."""

from __future__ import annotations

import gc
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.observability.call import RequestIds, is_request_id
from antiphon.v1 import inference_pb2 as pb
from tests.serving import MODEL_NAME, SOURCE, Gate, Serving, asking, asking_whole, details_of, refusal, serving, stub_of

OWN_ID = (("x-request-id", "shop-17/a"),)


def request_id_of(metadata: Any) -> str:
    """Return the single request id of trailing metadata."""
    (request_id,) = [value for key, value in metadata if key == "x-request-id"]
    return str(request_id)


def counts(served: Serving, family: str, *names: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a counter that are not zero, by the values of some labels."""
    return {
        tuple(sample.labels[name] for name in names): sample.value
        for metric in served.registry.collect()
        for sample in metric.samples
        if sample.name == f"antiphon_{family}_total" and sample.value
    }


@pytest.mark.parametrize("given", ["x", "shop-17/a", "~" * 128])
def test_request_id_of_the_client_is_used_when_it_is_printable(given: str) -> None:
    assert RequestIds().of(given) == given


@pytest.mark.parametrize("given", [None, "", "two words", "tab\t", "ünal", "~" * 129, b"bytes", "line\nbreak"])
def test_request_id_is_generated_when_the_client_sent_none_or_an_invalid_one(given: str | bytes | None) -> None:
    ids = RequestIds()
    made = [ids.of(given), ids.of(given), RequestIds().of(given)]
    assert len({*made}) == 3
    assert all(is_request_id(request_id) and len(request_id) < 16 for request_id in made)


async def test_request_id_is_returned_with_every_answer() -> None:
    async with serving() as served:
        stub = stub_of(served)
        unary = stub.GenerateUnary(asking_whole(), metadata=OWN_ID)
        await unary
        stream = stub.Generate(asking(), metadata=OWN_ID)
        assert [message async for message in stream]
        unnamed = stub.ListModels(pb.ListModelsRequest())
        await unnamed
        assert [request_id_of(await call.trailing_metadata()) for call in (unary, stream)] == ["shop-17/a"] * 2
        assert is_request_id(request_id_of(await unnamed.trailing_metadata()))


async def test_request_id_is_sent_before_the_first_message_of_a_stream() -> None:
    """A stream that breaks off has no trailers, so its headers must have the request id."""
    async with serving() as served:
        named = stub_of(served).Generate(asking(), metadata=OWN_ID)
        assert request_id_of(await named.initial_metadata()) == "shop-17/a"
        unnamed = stub_of(served).Generate(asking())
        first = request_id_of(await unnamed.initial_metadata())
        assert [message async for message in unnamed]
        assert request_id_of(await unnamed.trailing_metadata()) == first


async def test_request_id_is_returned_with_every_refusal_and_its_details() -> None:
    async with serving() as served:
        stub = stub_of(served)
        bad_bytes: Any = served.channel.unary_unary("/antiphon.v1.InferenceService/GenerateUnary")
        calls = {
            "INVALID_FIELD": stub.GenerateUnary(asking_whole(temperature=-1), metadata=OWN_ID),
            "MODEL_NOT_FOUND": stub.GetModel(pb.GetModelRequest(model="other"), metadata=OWN_ID),
            "UNSUPPORTED": stub.Embed(pb.EmbedRequest(pooling=pb.POOLING_MODEL), metadata=OWN_ID),
        }
        errors = {reason: await refusal(call) for reason, call in calls.items()}
        errors["INVALID_FIELD "] = await refusal(bad_bytes(b"\xff\xff", metadata=OWN_ID))
        for reason, error in errors.items():
            assert details_of(error).reason == reason.strip()
            assert request_id_of(error.trailing_metadata()) == "shop-17/a"


async def test_refusals_are_counted_once_by_model_and_reason() -> None:
    async with serving() as served:
        stub = stub_of(served)
        bad_bytes: Any = served.channel.unary_unary("/antiphon.v1.InferenceService/GenerateUnary")
        await refusal(bad_bytes(b"\xff\xff"))
        await refusal(stub.GetModel(pb.GetModelRequest(model="other")))
        await refusal(stub.GenerateUnary(asking_whole(temperature=-1)))
        await refusal(stub.Generate(asking((9999,))))
        await refusal(stub.Embed(pb.EmbedRequest(pooling=pb.POOLING_MODEL)))
        await served.settled()
        assert counts(served, "requests_refused", "model_name", "reason") == {
            ("", "INVALID_FIELD"): 1,
            ("", "MODEL_NOT_FOUND"): 1,
            (MODEL_NAME, "INVALID_FIELD"): 2,
            (MODEL_NAME, "UNSUPPORTED"): 1,
        }


async def test_request_that_fails_after_admission_is_not_counted_as_a_refusal() -> None:
    async with serving() as served:

        def fail(num_rows: int) -> None:
            raise RuntimeError("broken")

        served.runner.before_decode = fail
        await refusal(stub_of(served).GenerateUnary(asking_whole()))
        served.runner.before_decode = lambda num_rows: None
        assert counts(served, "requests_refused", "reason") == {}
        assert counts(served, "request_errors", "stage") == {("running",): 1}


async def test_rpcs_are_counted_by_method_and_status() -> None:
    async with serving() as served:
        stub, gate = stub_of(served), Gate(served.runner)
        call = stub.GenerateUnary(asking_whole())
        while not gate.reached.is_set():
            await stub.GetModel(pb.GetModelRequest())
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GenerateUnary(asking_whole(SOURCE), timeout=0.05)
        await refusal(stub.GetModel(pb.GetModelRequest(model="other")))
        gate.open()
        await served.calls.wait_until_idle()
        found = counts(served, "grpc_server_handled", "method", "code")
    service = "antiphon.v1.InferenceService"
    assert found.pop((f"{service}/GetModel", "OK")) >= 1
    assert found == {
        (f"{service}/GenerateUnary", "CANCELLED"): 1,
        (f"{service}/GenerateUnary", "DEADLINE_EXCEEDED"): 1,
        (f"{service}/GetModel", "NOT_FOUND"): 1,
    }


@pytest.mark.parametrize("num_characters", [100, 5000])  # read in the event loop, and in the thread of long texts
async def test_refused_requests_are_freed_without_garbage_collection(num_characters: int) -> None:
    """gRPC kept the error, whose frames referenced the request: megabytes per call until garbage collection."""

    def num_requests() -> int:
        return sum(
            type(found) is pb.GenerateUnaryRequest for found in gc.get_objects()
        )  # isinstance calls code of proxies

    request = pb.GenerateUnaryRequest(text="x" * num_characters)
    async with serving() as served:
        # Raw bytes: no message of the client's own is found in this process.
        ask: Any = served.channel.unary_unary("/antiphon.v1.InferenceService/GenerateUnary")
        gc.collect()
        before = num_requests()
        gc.disable()
        try:
            for _ in range(3):
                error = await refusal(ask(request.SerializeToString()))
                assert details_of(error).field == "text"
                del error
            await stub_of(served).GetModel(pb.GetModelRequest())  # when it is answered, the other calls have ended
            await served.settled()
            assert num_requests() == before
        finally:
            gc.enable()
