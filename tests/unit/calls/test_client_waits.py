"""Calls that wait for their clients: each has a time limit, and the largest holder makes room for the others."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.domain.errors import AntiphonError, RequestTimeout, SlowReader, TooManyRpcs
from antiphon.rpc.client_waits import ClientWaits, Stage, Wait
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes import FakeClock
from tests.serving import Serving, asking, serving, stub_of
from tests.waits import client_waits, comes_true


class Clients:
    """Begins waits, and records which of them were ended, with which error."""

    def __init__(self, waits: ClientWaits) -> None:
        self._waits = waits
        self.given_up: list[tuple[str, AntiphonError]] = []
        self.second = asyncio.Event()

    def begin(
        self, stage: Stage, name: str, *, caller: str = "", num_bytes: int = 0, backlog: Callable[[], int] | None = None
    ) -> Wait:
        """Begin a wait. name: `connection/number` of the call."""
        connection = name.partition("/")[0]
        wait = Wait(stage, caller or "host", connection, lambda error: self._note(name, error), num_bytes, backlog)
        self._waits.begin(wait)
        return wait

    def _note(self, name: str, error: AntiphonError) -> None:
        self.given_up.append((name, error))
        if len(self.given_up) == 2:
            self.second.set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.given_up]


Make = Callable[..., tuple[ClientWaits, Clients]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make(clock: FakeClock) -> Make:
    def make(**limits: int) -> tuple[ClientWaits, Clients]:
        waits = client_waits(clock=clock, **limits)  # type: ignore[arg-type]
        return waits, Clients(waits)

    return make


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [(Stage.REQUEST, RequestTimeout, "no complete request came within 0.05 s"), (Stage.ANSWER, SlowReader, "0.05 s")],
)
async def test_waits_end_oldest_first_when_time_is_over(stage: Stage, kind: type[AntiphonError], said: str) -> None:
    given_up: list[tuple[Stage, str]] = []
    clients = Clients(client_waits(request_timeout_s=0.05, answer_timeout_s=0.05, given_up=given_up))
    clients.begin(stage, "a/1")
    clients.begin(stage, "a/2")
    async with asyncio.timeout(60):
        await clients.second.wait()
    assert clients.names == ["a/1", "a/2"]
    assert all(isinstance(error, kind) and said in str(error) for _, error in clients.given_up)
    assert given_up == [(stage, "timeout")] * 2


async def test_wait_that_has_ended_is_not_given_up(make: Make) -> None:
    waits, clients = make(max_unsent_bytes=100)
    ended = clients.begin(Stage.ANSWER, "a/1", num_bytes=60)
    assert waits.end(ended)
    assert not waits.end(ended)
    clients.begin(Stage.ANSWER, "b/1", num_bytes=60)
    assert waits.unsent_bytes == 60
    assert clients.names == []


async def test_room_is_made_by_the_connection_with_the_most_waiting_calls(make: Make, clock: FakeClock) -> None:
    waits, clients = make()
    for name in ("busy/1", "calm/1", "busy/2", "busy/3"):
        clients.begin(Stage.ANSWER, name)
    clock.now_s += 2
    assert waits.make_room(32)
    assert clients.names == ["busy/1", "busy/2"]
    assert all(isinstance(error, TooManyRpcs) for _, error in clients.given_up)
    assert waits.num_waiting(Stage.ANSWER) == 2


async def test_room_is_made_by_the_caller_with_the_most_calls_of_all_connections(make: Make, clock: FakeClock) -> None:
    """A caller with many connections of one call each must not push out one with two calls on one connection."""
    waits, clients = make()
    for number in range(3):
        clients.begin(Stage.REQUEST, f"many{number}/1", caller="many")
    for number in range(2):
        clients.begin(Stage.REQUEST, f"few/{number}", caller="few")
    clock.now_s += 2
    assert waits.make_room(16)
    assert clients.names == ["many0/1"]


async def test_no_room_is_made_by_calls_that_have_only_begun_to_wait(make: Make, clock: FakeClock) -> None:
    waits, clients = make()
    clients.begin(Stage.OPEN, "a/1")
    clock.now_s += 0.5
    assert not waits.make_room(1)
    assert clients.names == []


async def test_number_of_incomplete_requests_is_bounded(make: Make, clock: FakeClock) -> None:
    waits, clients = make(max_requests=2)
    clients.begin(Stage.REQUEST, "a/1")
    clients.begin(Stage.REQUEST, "a/2")
    clock.now_s += 2
    clients.begin(Stage.REQUEST, "b/1")
    assert clients.names == ["a/1"]
    assert waits.num_waiting(Stage.REQUEST) == 2


async def test_unread_bytes_are_bounded_and_the_largest_holder_loses_its_oldest_answer(make: Make) -> None:
    waits, clients = make(max_unsent_bytes=160)
    clients.begin(Stage.ANSWER, "calm/1", num_bytes=50)
    clients.begin(Stage.ANSWER, "busy/1", num_bytes=60)
    clients.begin(Stage.ANSWER, "busy/2", num_bytes=50)
    assert clients.names == []
    clients.begin(Stage.ANSWER, "busy/3", num_bytes=10)
    assert clients.names == ["busy/1"]
    assert waits.unsent_bytes == 110


async def test_single_answer_may_be_larger_than_the_bound(make: Make) -> None:
    waits, clients = make(max_unsent_bytes=100)
    clients.begin(Stage.ANSWER, "a/1", num_bytes=500)
    assert clients.names == []
    clients.begin(Stage.ANSWER, "a/2", num_bytes=10)
    assert clients.names == ["a/1"]
    assert waits.unsent_bytes == 10


async def test_bytes_behind_unread_answers_count_while_they_grow(make: Make) -> None:
    """Regression: the limit counted the message alone, and 500 streams kept 400 MB behind theirs."""
    waits, clients = make(max_unsent_bytes=1000)
    backlogs = {"a/1": 0, "b/1": 0, "b/2": 0}
    for name in backlogs:
        caller = name.partition("/")[0]
        clients.begin(Stage.ANSWER, name, caller=caller, num_bytes=10, backlog=partial(backlogs.__getitem__, name))
    backlogs |= {"a/1": 300, "b/1": 200, "b/2": 250}
    await comes_true(lambda: waits.unsent_bytes == 780)
    assert clients.names == []
    backlogs |= {"a/1": 450, "b/1": 300}
    await comes_true(lambda: bool(clients.names))
    assert clients.names == ["b/1"]
    assert "more than 500 bytes" in str(clients.given_up[0][1])
    assert waits.unsent_bytes == 720


async def test_caller_may_have_half_of_the_bytes(make: Make) -> None:
    waits, clients = make(max_unsent_bytes=1000)
    clients.begin(Stage.ANSWER, "a/1", caller="a", num_bytes=400)
    for number in range(4):
        clients.begin(Stage.ANSWER, f"b/{number}", caller="b", num_bytes=140)
    await comes_true(lambda: bool(clients.names))
    assert clients.names == ["b/0"]
    assert waits.unsent_bytes == 820


async def test_incomplete_requests_of_a_flood_are_ended_at_any_age(make: Make) -> None:
    """Regression: 4,000 messages without their ends took 800 MB within a second."""
    waits, clients = make(max_requests=16)
    for number in range(24):
        clients.begin(Stage.REQUEST, f"a/{number}")
    assert clients.names == []
    clients.begin(Stage.REQUEST, "b/1")
    assert clients.names == [f"a/{number}" for number in range(10)]
    assert waits.num_waiting(Stage.REQUEST) == 15


async def test_incomplete_requests_are_ended_once_they_are_old(make: Make, clock: FakeClock) -> None:
    """Regression: they were looked at when another request began, which may be never."""
    waits, clients = make(max_requests=2)
    for number in range(3):
        clients.begin(Stage.REQUEST, f"a/{number}")
    clock.now_s += 2
    await comes_true(lambda: bool(clients.names))
    assert clients.names == ["a/0"]
    assert waits.num_waiting(Stage.REQUEST) == 2


WINDOW_BYTES = 1024
TINY_WINDOW_BYTES = 64  # smaller than any first message
OPTIONS = [("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
# Much longer than the computation of all tokens, also on a busy machine.
COMPUTED_S = 5.0
LONG = (30, 30, 31)  # answered with thirty tokens
# Alternatives make a message large: thirty tokens overflow the window several times.
HEAVY: dict[str, Any] = {"num_logprobs": 20, "num_return_sequences": 2, "temperature": 1.0, "seed": 1}


@contextlib.asynccontextmanager
async def stuck(
    served: Serving, *, timeout_s: float | None = None, window_bytes: int = WINDOW_BYTES
) -> AsyncIterator[Any]:
    """Open a stream on a separate channel that its client does not read."""
    options = [*OPTIONS, ("grpc.http2.lookahead_bytes", window_bytes)]
    async with grpc.aio.insecure_channel(served.target, options=options) as channel:
        yield InferenceServiceStub(channel).Generate(asking(LONG, **HEAVY), timeout=timeout_s)


async def idle(served: Serving) -> None:
    async with asyncio.timeout(60):
        await served.calls.wait_until_idle()


def ended(served: Serving) -> dict[str, float]:
    """Return the ends of requests without a full answer, by cause and stage."""
    return {
        f"{sample.labels.get('cause', 'deadline')}/{sample.labels['stage']}": sample.value
        for family in served.registry.collect()
        for sample in family.samples
        if sample.name in ("antiphon_cancellations_total", "antiphon_deadline_misses_total") and sample.value
    }


class Steps:
    """Reports the start of the first step, and blocks a step on request."""

    def __init__(self, served: Serving) -> None:
        self._served = served
        self._begun = threading.Event()
        self._released = threading.Event()
        self._held: int | None = None
        served.runner.before_decode = self._pass

    def hold(self, step: int) -> None:
        self._held = step

    def release(self) -> None:
        self._released.set()

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 60)

    async def over(self) -> None:
        assert await asyncio.to_thread(self._served.engine.drain, 60)

    def _pass(self, num_rows: int) -> None:
        self._begun.set()
        if len(self._served.runner.decoded_rows) == self._held:
            assert self._released.wait(60)


async def test_unread_stream_does_not_block_the_engine_and_is_ended_at_its_time_limit() -> None:
    async with serving(slow_reader_timeout_s=COMPUTED_S) as served, stuck(served) as call:
        steps = Steps(served)
        await steps.begun()
        neighbour = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(token_ids=pb.TokenIds(ids=(9, 30))))
        assert neighbour.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        await idle(served)
        await steps.over()
        assert ended(served) == {"slow_reader/streaming": 1.0}
        await expect_slow_reader(call)


async def test_client_that_reads_nothing_receives_the_status_of_its_stream() -> None:
    """The window is smaller than the first message; the client still receives the status when it reads."""
    async with serving(slow_reader_timeout_s=0.3) as served, stuck(served, window_bytes=TINY_WINDOW_BYTES) as call:
        await Steps(served).begun()
        await idle(served)
        await expect_slow_reader(call)


async def test_slow_reader_loses_its_rows_and_blocks_while_its_request_runs() -> None:
    """The engine is blocked until the time limit of the slow reader; then the next step must not decode for it."""
    async with serving(slow_reader_timeout_s=0.3) as served:
        steps = Steps(served)
        steps.hold(20)  # the window is full after these steps
        async with stuck(served):
            await steps.begun()
            await idle(served)
            steps.release()
            await steps.over()
        assert len(served.runner.decoded_rows) == 21
        assert ended(served) == {"slow_reader/running": 1.0}


async def test_deadline_ends_a_stream_that_waits_for_its_reader() -> None:
    async with serving() as served, stuck(served, timeout_s=COMPUTED_S) as call:
        steps = Steps(served)
        await steps.begun()
        await idle(served)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await steps.over()
        assert ended(served) == {"deadline/streaming": 1.0}


async def test_cancellation_ends_a_stream_that_waits_for_its_reader() -> None:
    async with serving() as served:
        async with stuck(served) as call:
            steps = Steps(served)
            await steps.begun()
            await steps.over()
            call.cancel()
            await idle(served)
        assert ended(served) == {"client/streaming": 1.0}


async def test_reader_that_is_slow_but_in_time_receives_every_token() -> None:
    async with serving(slow_reader_timeout_s=60) as served:
        expected = await joined(stub_of(served).Generate(asking(LONG, **HEAVY)))
        assert sum(map(len, expected.values())) == 2 * (30 + 1)  # end tokens have log-probabilities too
        async with stuck(served) as call:
            steps = Steps(served)
            await steps.begun()
            await steps.over()
            assert await joined(call) == expected
        assert ended(served) == {}


async def expect_slow_reader(call: Any) -> None:
    """Read the received messages of a stream, and check that it was ended because it was read too late."""
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(caught.value.details()).startswith("the client took no message for ")


async def joined(call: Any) -> dict[int, list[pb.TokenLogprob]]:
    """Return the tokens of each output of a stream. Their messages together exceed the flow-control window."""
    outputs: dict[int, list[pb.TokenLogprob]] = {0: [], 1: []}
    num_bytes = 0
    async for message in call:
        outputs[message.output_index] += message.logprobs
        num_bytes += message.ByteSize()
    assert num_bytes > 4 * WINDOW_BYTES
    return outputs
