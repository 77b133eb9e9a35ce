"""Limits of the queue for clients: a refusal without response headers, with a retry delay."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.domain.request import Priority
from antiphon.engine.request_queue import MAX_RETRY_S, MIN_RETRY_S
from antiphon.engine.stream import OutputStream
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import FakeClock, FakeRunner, changed, request_of, source_of
from tests.serving import Details, Serving, asking, asking_whole, details_of, refusal, serving, stub_of
from tests.waits import comes_true

STEP_S = 0.1
THIS_HOST = "ipv4:127.0.0.1"
LENGTH = 5  # source tokens of every waiting request


class Overload:
    """Server with one row and steps of STEP_S, blocked before a step while requests wait."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._is_open = threading.Event()
        self._is_open.set()
        self.reached = threading.Event()
        self._tickets = itertools.count()
        self.served: Serving

    def prepare(self, runner: FakeRunner) -> None:
        runner.before_decode = self._pass

    async def hold(self) -> None:
        """Start a request and block it."""
        self._is_open.clear()
        self.reached.clear()
        self.wait(1)
        assert await asyncio.to_thread(self.reached.wait, 60)

    def release(self) -> None:
        self._is_open.set()

    def wait(
        self, count: int, *, client: str = "other", priority: Priority = Priority.INTERACTIVE
    ) -> list[OutputStream]:
        """Queue `count` further requests of a client, each with three steps."""
        streams = []
        for _ in range(count):
            name = f"waiting {next(self._tickets)}"
            made = request_of(name, source_of(target_len=2, length=LENGTH), arrival_s=self.clock())
            stream = OutputStream(name)
            self.served.engine.submit(changed(made, client=client, priority=priority), stream)
            streams.append(stream)
        return streams

    async def measure(self) -> None:
        """Let the server measure its speed with one request of three steps."""
        streams = self.wait(20)
        await asyncio.gather(*(stream.collect() for stream in streams))

    def _pass(self, num_rows: int) -> None:
        self.clock.advance(STEP_S)
        self.reached.set()
        if not self._is_open.wait(timeout=60):
            raise AssertionError("the test did not open the gate")


@contextlib.asynccontextmanager
async def overload(limits: EngineLimits) -> AsyncIterator[Overload]:
    held = Overload()
    limits = dataclasses.replace(limits, max_num_seqs=1)
    async with serving(limits, prepare=held.prepare, clock=held.clock) as served:
        held.served = served
        try:
            yield held
        finally:
            held.release()


async def pushed_back(served: Serving) -> tuple[grpc.aio.AioRpcError, Details]:
    """Return the refusals of a stream and of a unary call, which must be equal."""
    for call in (
        stub_of(served).Generate(asking(source_of(target_len=2, length=LENGTH))),
        stub_of(served).GenerateUnary(asking_whole(source_of(target_len=2, length=LENGTH))),
    ):
        error = await refusal(call)
        details = details_of(error)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.reason == "QUEUE_FULL"
        assert details.retry_after_s is not None
        assert MIN_RETRY_S <= details.retry_after_s <= MAX_RETRY_S
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) == round(details.retry_after_s * 1000)
    return error, details


async def test_request_is_refused_before_it_is_read_when_the_queue_is_full() -> None:
    """Its invalid source is not read: reading takes CPU time from running requests."""
    async with overload(EngineLimits(max_queued_requests=2)) as held:
        unread = asking(prefix_ids=pb.TokenIds(ids=(10**6,)))
        taken = await refusal(stub_of(held.served).Generate(unread))
        await held.hold()
        held.wait(2)
        refused = await refusal(stub_of(held.served).Generate(unread))
    assert taken.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.code(), details_of(refused).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")


async def test_call_is_refused_before_its_request_arrives_when_the_queue_is_full() -> None:
    async with overload(EngineLimits(max_queued_requests=2)) as held:
        await held.hold()
        held.wait(2)
        call: Any = held.served.channel.stream_stream("/antiphon.v1.InferenceService/Generate")()
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await held.served.settled()
        (ended,) = held.served.ended
        labels = {"model_name": "fake", "reason": "QUEUE_FULL"}
        counted = held.served.registry.get_sample_value("antiphon_requests_refused_total", labels)
    assert (ended.code, ended.model_name) == ("RESOURCE_EXHAUSTED", "fake")
    assert counted == 1


async def test_refused_call_has_every_trailer_and_is_counted_once_when_the_queue_is_full() -> None:
    async with overload(EngineLimits(max_queued_requests=2)) as held:
        served = held.served
        await held.hold()
        held.wait(2)
        named = stub_of(served).GenerateUnary(asking_whole(), metadata=(("x-request-id", "shop-17/a"),))
        trailers = dict((await refusal(named)).trailing_metadata())
        headers = await named.initial_metadata()
        await served.settled()
        (ended,) = served.ended
        labels = {"method": "antiphon.v1.InferenceService/GenerateUnary", "code": "RESOURCE_EXHAUSTED"}
        counted = served.registry.get_sample_value("antiphon_grpc_server_handled_total", labels)
        in_flight = served.registry.get_sample_value("antiphon_grpc_server_in_flight")
    assert trailers["x-request-id"] == "shop-17/a"
    assert {"grpc-retry-pushback-ms", "grpc-status-details-bin"} < set(trailers)
    assert "endpoint-load-metrics-bin" in dict(ended.trailers)  # gRPC clients do not show it
    assert not headers  # a client may send a call without headers to another server
    assert (counted, in_flight) == (1, 0)
    assert (ended.request_id, ended.code, ended.caller) == ("shop-17/a", "RESOURCE_EXHAUSTED", THIS_HOST)
    assert ended.error is not None
    assert ended.error.reason == "QUEUE_FULL"
    assert ended.ended_s is not None


async def test_refused_calls_are_freed_without_garbage_collection_when_the_queue_is_full() -> None:
    def num_contexts() -> int:
        return sum(type(found).__name__ == "_ServicerContext" for found in gc.get_objects())

    async with overload(EngineLimits(max_queued_requests=2)) as held:
        await held.hold()
        held.wait(2)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await pushed_back(held.served)
            await held.served.settled()
            await comes_true(lambda: num_contexts() == 0)
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("limits", "waiting", "said"),
    [
        (EngineLimits(max_queued_requests=3), {"other": 3}, "3 requests wait"),
        (EngineLimits(max_queued_tokens=2 * LENGTH), {"one": 1, "two": 1}, f"{2 * LENGTH} source tokens wait"),
        (EngineLimits(max_queued_requests=8), {THIS_HOST: 4, "other": 2}, "this client"),
    ],
)
async def test_a_queue_full_of_requests_tokens_or_one_client_pushes_back(
    limits: EngineLimits, waiting: dict[str, int], said: str
) -> None:
    async with overload(limits) as held:
        await held.hold()
        for client, count in waiting.items():
            held.wait(count, client=client)
        error, _ = await pushed_back(held.served)
        assert said in (error.details() or "")
        if THIS_HOST in waiting:
            held.wait(2)  # others are not pushed back


async def test_a_wait_above_the_bound_pushes_back_for_as_long_as_it_would_take() -> None:
    async with overload(EngineLimits(max_queue_time_s=1.0)) as held:
        await held.measure()
        await held.hold()
        streams = held.wait(4, client=THIS_HOST)  # three steps each
        error, details = await pushed_back(held.served)
        assert "longer than the 1 s allowed" in (error.details() or "")
        assert details.retry_after_s == pytest.approx(4 * 3 * STEP_S, rel=0.25)
        held.release()
        assert all([(await stream.collect())[-1].error is None for stream in streams])
        assert (await stub_of(held.served).GenerateUnary(asking_whole())).outputs


async def test_a_deadline_before_its_turn_is_refused_at_once() -> None:
    async with overload(EngineLimits(max_queue_time_s=None)) as held:
        await held.measure()
        await held.hold()
        held.wait(200, client=THIS_HOST)  # a minute of the engine's clock
        call = stub_of(held.served).GenerateUnary(asking_whole(), timeout=20.0)
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details_of(error).reason == "DEADLINE_EXCEEDED"
        labels = {"model_name": "fake", "stage": "submit"}
        assert held.served.registry.get_sample_value("antiphon_deadline_misses_total", labels) == 1
        patient = stub_of(held.served).GenerateUnary(asking_whole(), timeout=300.0)
        held.release()
        assert (await patient).outputs


async def test_a_batch_request_waits_behind_what_an_interactive_one_overtakes() -> None:
    """The expected wait of an interactive request counts little of the batch that waits, that of a batch all of it."""
    async with overload(EngineLimits(max_queue_time_s=5.0)) as held:
        await held.measure()
        await held.hold()
        held.wait(16, client=THIS_HOST, priority=Priority.BATCH)  # 4.8 seconds
        held.wait(4)
        request = asking_whole()
        request.priority = pb.PRIORITY_BATCH
        assert details_of(await refusal(stub_of(held.served).GenerateUnary(request))).reason == "QUEUE_FULL"
        request.priority = pb.PRIORITY_INTERACTIVE
        taken = stub_of(held.served).GenerateUnary(request)
        held.release()
        assert (await taken).outputs


async def test_request_that_could_never_run_is_refused_as_invalid_and_not_as_overload() -> None:
    """A source beyond the workspace and a target beyond the pool are refused at once with the names of the fields."""
    budget = EncodeBudget(max_bytes=100, predict=lambda num_tokens, longest: 10 * num_tokens)
    async with serving(EngineLimits(max_num_seqs=8, encode_budget=budget)) as served:
        error = await refusal(stub_of(served).GenerateUnary(asking_whole((9,) * 10)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error).field == "token_ids"
        assert "1 to 10 tokens long" in (error.details() or "")
        assert (await stub_of(served).GenerateUnary(asking_whole((9,) * 9))).outputs


async def test_preemption_is_invisible_to_clients() -> None:
    """Many streams over a pool of few blocks get the answers of each alone, in order and once."""

    def tight(runner: FakeRunner) -> None:
        runner.facts = dataclasses.replace(runner.facts, num_blocks=10)

    asked = [source_of(target_len=20 + index % 9, variant=index) for index in range(12)]
    async with serving(prepare=tight) as served:

        async def tokens(source: tuple[int, ...]) -> list[int]:
            return [one async for part in stub_of(served).Generate(asking(source)) for one in part.token_ids]

        found = await asyncio.gather(*map(tokens, asked))
        assert found == [served.runner.answer(source)[0] for source in asked]
        preemptions = served.registry.get_sample_value("antiphon_preemptions_total", {"model_name": "fake"})
        assert preemptions is not None
        assert preemptions > 0
