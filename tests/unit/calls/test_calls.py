"""Requests of a call: order of middlewares, turns on the event loop, and one id and one count for every RPC."""

import asyncio
import gc
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import QueueFull, SlowReader
from antiphon.observability.call import CallRecord, RequestIds, is_request_id
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.client_waits import ClientWaits, Writer
from antiphon.rpc.context import Metadata, RequestContext
from antiphon.rpc.endpoints import Handler, ServerCall, one_request
from antiphon.rpc.middleware import CallLimits, CallMiddleware, CallTurns, compose, refusal_of
from antiphon.rpc.parsing import parser
from antiphon.v1 import inference_pb2 as pb
from tests.serving import MODEL_NAME, SOURCE, Gate, Serving, asking, asking_whole, details_of, refusal, serving, stub_of
from tests.waits import client_waits

OWN_ID = (("x-request-id", "shop-17/a"),)


def request_id_of(metadata: Any) -> str:
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


class GoneClient:
    """Stand-in for gRPC's context of a call whose client has left."""

    def invocation_metadata(self) -> Metadata:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4242"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        raise grpc.aio.InternalError


async def test_call_refused_before_its_request_is_counted_once_when_its_client_has_left() -> None:
    def refuse(record: CallRecord) -> None:
        raise QueueFull("full", retry_after_s=1.0)

    async def answer(request: Any, context: RequestContext) -> None:
        raise AssertionError("a refused call is not answered")

    ended: list[CallRecord] = []
    registry = CollectorRegistry()
    middleware = CallMiddleware(Telemetry(MetricFamilies(registry), ended.append), client_waits())
    guarded = middleware.guard("a.Service/Method", one_request(answer, parser(pb.GenerateUnaryRequest), refuse))
    context: Any = GoneClient()
    with pytest.raises(asyncio.CancelledError):
        await guarded(None, context)
    await middleware.wait_until_idle()
    assert [record.code for record in ended] == ["RESOURCE_EXHAUSTED"]
    assert registry.get_sample_value("antiphon_grpc_server_in_flight") == 0


@pytest.mark.parametrize(("num_bytes", "is_refused"), [(100, True), (101, False)])
def test_check_before_the_request_leaves_a_call_with_too_much_metadata_to_the_limits(
    num_bytes: int, is_refused: bool
) -> None:
    """The client must not try again: every further try would be refused too."""

    def refuse(record: CallRecord) -> None:
        raise QueueFull("full", retry_after_s=1.0)

    record = CallRecord(method="a.Service/Method", request_id="1", arrival_s=0.0, num_metadata_bytes=num_bytes)
    error = refusal_of(refuse, record, CallLimits(max_metadata_bytes=100))
    assert (error is not None) == is_refused


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


async def test_call_of_another_caller_starts_before_the_rest_of_a_burst() -> None:
    """Regression: it waited behind 5,100 calls of one client for 4 to 6 seconds."""
    turns, started = CallTurns(calls_per_turn=2), list[str]()

    async def call(caller: str) -> None:
        await turns.take(caller)
        started.append(caller)

    burst = [asyncio.ensure_future(call("many")) for _ in range(100)]
    await asyncio.sleep(0)
    late = asyncio.ensure_future(call("one"))
    await asyncio.gather(*burst, late)
    assert started.index("one") <= 6
    assert started.count("many") == 100


async def test_waiting_call_takes_no_turn_when_it_has_ended() -> None:
    turns, started = CallTurns(calls_per_turn=1), list[int]()

    async def call(number: int) -> None:
        await turns.take("a")
        started.append(number)

    calls = [asyncio.ensure_future(call(number)) for number in range(4)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.wait(calls)
    assert started == [0, 2, 3]


async def test_calls_start_immediately_when_there_are_few() -> None:
    turns = CallTurns(calls_per_turn=4)
    for _ in range(4):
        taking = turns.take("a")
        try:
            taking.send(None)
        except StopIteration:
            continue
        raise AssertionError("a call waited although no other did")


async def test_waiting_calls_are_forgotten_when_all_have_started() -> None:
    turns = CallTurns(calls_per_turn=1)
    await asyncio.gather(*(turns.take(str(number % 3)) for number in range(30)))
    assert turns.num_waiting == 0


CALL: Any = object()


class Client:
    """Records what a call sends."""

    def __init__(self) -> None:
        self.headers: list[Metadata] = []
        self.messages: list[bytes] = []

    async def send_headers(self, headers: Metadata) -> None:
        self.headers.append(headers)

    async def send(self, data: bytes) -> None:
        self.messages.append(data)


def context_of(client: Client, *, left_s: float | None = None) -> RequestContext:
    return RequestContext(
        record=CallRecord(method="m", request_id="call-1", arrival_s=0.0, caller="alice"),
        metadata=(("key", "value"),),
        deadline_s=None if left_s is None else time.monotonic() + left_s,
        waits=client_waits(),
        send=client.send,
        send_headers=client.send_headers,
    )


async def test_the_first_middleware_is_outermost_and_may_end_a_call_itself() -> None:
    order: list[str] = []

    async def outer(handler: Handler, call: ServerCall) -> Any:
        order.append("outer")
        try:
            return await handler(call)
        finally:
            order.append("outer ends")

    async def inner(handler: Handler, call: ServerCall) -> Any:
        order.append("inner")
        return await handler(call)

    async def refuse(handler: Handler, call: ServerCall) -> Any:
        raise ValueError

    async def endpoint(call: ServerCall) -> str:
        order.append("endpoint")
        return "answer"

    assert await compose((outer, inner), endpoint)(CALL) == "answer"
    assert order == ["outer", "inner", "endpoint", "outer ends"]
    order.clear()
    with pytest.raises(ValueError, match=r"^$"):
        await compose((outer, refuse, inner), endpoint)(CALL)
    assert order == ["outer", "outer ends"]


@pytest.mark.parametrize(
    ("left_s", "timeout_s", "expected_s"),
    [(None, None, None), (50.0, None, 50.0), (None, 5.0, 5.0), (50.0, 5.0, 5.0), (5.0, 50.0, 5.0), (-1.0, 5.0, 0.0)],
)
def test_a_request_has_the_earlier_of_its_own_and_the_calls_deadline(
    left_s: float | None, timeout_s: float | None, expected_s: float | None
) -> None:
    remaining_s = context_of(Client(), left_s=left_s).derive(timeout_s=timeout_s).remaining_s()
    assert remaining_s == (None if expected_s is None else pytest.approx(expected_s, abs=1.0))
    assert remaining_s is None or expected_s is None or remaining_s <= expected_s


async def test_a_request_has_its_own_record_and_the_headers_are_sent_once_by_the_call() -> None:
    client, messages = Client(), list[bytes]()

    async def send(data: bytes) -> None:
        messages.append(data)

    call = context_of(client)
    record = CallRecord(method="m:request", request_id="call-1/7", arrival_s=0.0, caller="alice")
    request = call.derive(record=record, send=send)
    await request.writer().write(b"part")
    assert (request.request_id, request.caller, request.metadata) == ("call-1/7", "alice", call.metadata)
    assert (messages, client.headers, record.num_messages, call.record.num_messages) == ([b"part"], [], 1, 0)
    writer = call.writer()
    await writer.write(b"one")
    await writer.write(b"two")
    assert client.messages == [b"one", b"two"]
    assert client.headers == [(("x-request-id", "call-1"),)]
    assert (record.num_messages, call.record.num_messages) == (1, 2)


class Reader:
    """Call whose client reads a message on request."""

    def __init__(self) -> None:
        self._has_room = asyncio.Event()
        self.is_written_to = asyncio.Event()

    def take(self) -> None:
        self._has_room.set()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Headers need no room."""

    async def write(self, message: Any) -> None:
        self.is_written_to.set()
        await self._has_room.wait()


class Clock:
    """Clock that a test advances. The timer of the time limit reads it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._is_read = asyncio.Event()

    def __call__(self) -> float:
        self._is_read.set()
        return self.now_s

    async def next_reading(self) -> None:
        self._is_read.clear()
        await self._is_read.wait()


class Gone:
    """Call that has ended."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        raise grpc.aio.InternalError

    async def write(self, message: Any) -> None:
        raise AssertionError("written after the call has ended")


def writer_of(client: Any, waits: ClientWaits) -> Writer:
    record = CallRecord(method="m", request_id="r", arrival_s=0.0)
    return Writer(waits, record, client.write, lambda: client.send_initial_metadata(()))


async def test_writer_ends_each_write_whose_client_reads_nothing() -> None:
    """The first write sets the timer; it serves later writes too."""
    waits = client_waits(answer_timeout_s=0.05)
    order: list[int] = []

    async def write(index: int, reader: Any) -> None:
        with pytest.raises(SlowReader):
            await writer_of(reader, waits).write(b"")
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        order.append(index)

    readers = [Reader() for _ in range(3)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index, reader in enumerate(readers):
            group.create_task(write(index, reader))
            await reader.is_written_to.wait()
    assert order == [0, 1, 2]


async def test_writer_limits_the_time_of_each_message_and_not_of_the_stream() -> None:
    """Each message waits for less than the limit, and the stream for more. The test advances the clock."""
    clock = Clock()
    waits = client_waits(answer_timeout_s=0.05, clock=clock)
    for _ in range(4):
        reader = Reader()
        writing = asyncio.ensure_future(writer_of(reader, waits).write(b""))
        await reader.is_written_to.wait()
        clock.now_s += 0.03
        async with asyncio.timeout(60):
            await clock.next_reading()  # by the timer, while the message waits
        reader.take()
        await writing


async def test_writer_reports_no_slow_reader_when_the_call_is_cancelled() -> None:
    """A call that ended otherwise is not reported as a slow reader if its time passes during its cleanup."""
    waits = client_waits(answer_timeout_s=0.05)
    reader = Reader()
    writing = asyncio.ensure_future(writer_of(reader, waits).write(b""))
    await reader.is_written_to.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(SlowReader):  # the timer was set for the first one, and serves the second
        await writer_of(reader, waits).write(b"")


async def test_writer_cancels_a_write_when_its_call_has_ended() -> None:
    with pytest.raises(asyncio.CancelledError):
        await writer_of(Gone(), client_waits()).write(b"")


async def test_cancellation_waits_until_a_message_that_is_written_to_the_end_is_sent() -> None:
    """A call of many requests that ends with an error can send its status only after the headers."""
    reader = Reader()
    record = CallRecord(method="m", request_id="r", arrival_s=0.0)
    writer = Writer(client_waits(), record, reader.write, lambda: reader.send_initial_metadata(()))
    writing = asyncio.ensure_future(writer.write_to_the_end(b""))
    await reader.is_written_to.wait()
    writing.cancel()
    await asyncio.wait({writing}, timeout=0)
    assert (writing.done(), record.num_messages) == (False, 0)
    reader.take()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert record.num_messages == 1
