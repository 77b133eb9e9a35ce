"""The open loop and its calls, with scripted callers and servers, and with the real servicer."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from antiphon.domain.limits import EngineLimits
from antiphon.load.calls import Caller
from antiphon.load.drive import DriveError, drive, run
from antiphon.load.open_loop import offer
from antiphon.load.plan import Ask, Plan
from antiphon.load.results import INCOMPLETE, OK, UNFINISHED, Outcome, Reply, Result
from antiphon.load.workload import Arrival, arrivals_of
from antiphon.v1 import inference_pb2 as pb
from tests.load.scripted import Asked, Scripted, at_once, served
from tests.serving import Gate, serving

ASKS = (Ask(source="the cat sat", max_new_tokens=4), Ask(source="on the mat"))
# Requests with a time in the past are sent at once.
LONG_AGO_S = 5.0
PATIENCE_S = 60


def plan_of(target: str = "", **changes: Any) -> Plan:
    return Plan(**{"asks": ASKS, "rate": 100.0, "duration_s": 0.3, "target": target, **changes})


class HeldCaller:
    """Calls that end when the test ends them, or when they are cancelled."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.open = asyncio.Event()

    async def call(self, ask: int, scheduled_s: float, start_s: float) -> Reply:
        self.num_begun += 1
        outcome = Outcome(UNFINISHED)
        try:
            await self.open.wait()
            outcome = Outcome(OK)
        except asyncio.CancelledError:
            pass
        now_s = time.monotonic() - start_s
        return Reply(scheduled_s=scheduled_s, sent_s=now_s, last_s=now_s, outcome=outcome)


def then_open(caller: HeldCaller, count: int) -> Iterator[Arrival]:
    """Offer arrivals that are due; the calls end only after all of them were due."""
    yield from ((0.0, 0) for _ in range(count))
    caller.open.set()


async def offered(caller: HeldCaller, plan: Plan, arrivals: Iterator[Arrival], stop: asyncio.Event) -> Result:
    async with asyncio.timeout(PATIENCE_S):
        record = await offer(caller, plan, arrivals, start_s=time.monotonic() - LONG_AGO_S, stop=stop)
    return Result(plan=plan, record=record)


async def test_next_request_is_sent_without_waiting_for_an_answer() -> None:
    caller = HeldCaller()
    result = await offered(caller, plan_of(), then_open(caller, 50), asyncio.Event())
    assert result.num_sent == result.num_ok == caller.num_begun == 50


async def test_latency_counts_from_the_scheduled_time_when_the_request_is_sent_late() -> None:
    caller = HeldCaller()
    result = await offered(caller, plan_of(), then_open(caller, 5), asyncio.Event())
    assert result.e2e_ms is not None
    assert result.lag_ms is not None
    assert result.e2e_ms.p50 >= result.lag_ms.p50 >= 1e3 * LONG_AGO_S
    assert not result.has_kept_up


async def test_arrivals_beyond_the_limit_of_outstanding_requests_are_dropped_and_counted() -> None:
    caller = HeldCaller()
    result = await offered(caller, plan_of(max_outstanding=3), then_open(caller, 10), asyncio.Event())
    assert (result.num_sent, result.num_ok, result.num_dropped) == (3, 3, 7)
    assert result.error_share == pytest.approx(0.7)


async def test_run_is_given_up_when_the_client_is_far_too_late() -> None:
    caller = HeldCaller()
    plan = plan_of(duration_s=0.3, timeout_s=0.2)  # over by now, deadlines included
    result = await offered(caller, plan, then_open(caller, 10), asyncio.Event())
    assert (result.num_sent, result.num_dropped, result.has_kept_up) == (0, 10, False)


async def test_stopped_run_keeps_its_results_so_far() -> None:
    caller, stop = HeldCaller(), asyncio.Event()

    def endless() -> Iterator[Arrival]:
        for index in itertools.count():
            if index == 8:
                stop.set()
            yield 0.0, 0

    result = await offered(caller, plan_of(), endless(), stop)
    assert result.is_interrupted
    assert result.num_sent == result.num_unfinished == caller.num_begun >= 8
    assert (result.num_ok, result.errors) == (0, {})


async def test_requests_of_the_warm_up_are_sent_and_not_counted() -> None:
    caller = HeldCaller()
    caller.open.set()
    arrivals = iter([(0.0, 0), (0.5, 0), (1.0, 0), (1.5, 0)])
    result = await offered(caller, plan_of(warmup_s=1.0), arrivals, asyncio.Event())
    assert (caller.num_begun, result.num_sent, result.record.num_warmup) == (4, 2, 2)


async def test_fault_of_the_client_is_not_counted_as_an_answer() -> None:
    class Broken(HeldCaller):
        async def call(self, ask: int, scheduled_s: float, start_s: float) -> Reply:
            raise RuntimeError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        await offered(Broken(), plan_of(), iter([(0.0, 0)]), asyncio.Event())
    assert caught.group_contains(RuntimeError, match="broken")


@pytest.mark.parametrize("is_multiplexed", [False, True])
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_every_request_has_the_options_of_the_plan(is_streaming: bool, is_multiplexed: bool) -> None:
    scripted = Scripted()
    async with served(scripted) as target:
        plan = plan_of(
            target, model="m", priority="batch", ignore_eos=True, timeout_s=20.0, connections=2, check=True,
            is_streaming=is_streaming, is_multiplexed=is_multiplexed,
        )  # fmt: skip
        result = await drive(plan)
    assert result.num_ok == result.num_sent == len(scripted.asked) == len(list(arrivals_of(plan)))
    for request, _, remaining_s in scripted.asked:
        assert (request.model, request.priority, request.options.ignore_eos) == ("m", pb.PRIORITY_BATCH, True)
        assert request.options.HasField("max_new_tokens") is (request.text == ASKS[0].source)
        assert remaining_s is not None
        assert 0 < remaining_s <= 20.5  # gRPC rounds a timeout up
    assert len({peer for _, peer, _ in scripted.asked}) == 2
    assert sum(result.record.num_tokens) == 4 * result.num_ok
    assert (result.record.num_compared, result.record.num_mismatches) == (result.num_ok - 2, 0)
    assert (result.ttft_ms is not None) is is_streaming


async def test_different_answers_to_equal_texts_are_detected() -> None:
    numbers = itertools.count()

    async def changing(request: Asked) -> list[pb.GenerateResponse]:
        return [pb.GenerateResponse(text_delta=str(next(numbers)), finish_reason=pb.FINISH_REASON_STOP)]

    async with served(Scripted(changing)) as target:
        # The same text twice in a trace is the same request.
        times_s = tuple(index / 100 for index in range(6))
        plan = plan_of(target, asks=(Ask(source="again"),) * 6, rate=None, times_s=times_s, check=True)
        result = await drive(plan)
    assert (result.num_ok, result.record.num_mismatches) == (6, 5)


@pytest.mark.parametrize("num_ends", [0, 2])
async def test_stream_without_exactly_one_end_is_an_error(num_ends: int) -> None:
    async def answer(request: Asked) -> list[pb.GenerateResponse]:
        *words, end = await at_once(request)
        return [*words, *[end] * num_ends]

    async with served(Scripted(answer)) as target:
        result = await drive(plan_of(target))
    assert result.errors == {INCOMPLETE: result.num_sent}


class CountingCaller(Caller):
    """Open a gate after a number of calls has ended."""

    def __init__(self, plan: Plan, gate: Gate, count: int) -> None:
        super().__init__(plan)
        self._gate = gate
        self._left = count

    async def call(self, *given: Any) -> Reply:
        reply = await super().call(*given)
        self._left -= 1
        if self._left == 0:
            self._gate.open()
        return reply


@pytest.mark.parametrize("is_multiplexed", [False, True])
async def test_refusals_are_counted_by_status_reason_and_pushback(is_multiplexed: bool) -> None:
    gates: list[Gate] = []
    config = EngineLimits(max_num_seqs=1, max_queued_requests=2)
    async with serving(config, prepare=lambda runner: gates.append(Gate(runner))) as server:
        plan = plan_of(server.target, is_multiplexed=is_multiplexed)
        async with CountingCaller(plan, gates[0], 7) as caller:
            await caller.connect()
            arrivals = ((0.0, 0) for _ in range(10))
            record = await offer(caller, plan, arrivals, start_s=time.monotonic(), stop=asyncio.Event())
        result = Result(plan=plan, record=record)
        num_refused = sum(result.errors.values())
        assert (result.num_sent, result.num_ok) == (10, 10 - num_refused)
        assert num_refused >= 7
        assert result.error_reasons == {"RESOURCE_EXHAUSTED/QUEUE_FULL": num_refused}
        assert result.num_pushbacks == num_refused
        assert sum(map(len, server.runner.encoded)) == result.num_ok


@pytest.mark.parametrize("is_multiplexed", [False, True])
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_refused_request_is_not_retried(is_streaming: bool, is_multiplexed: bool) -> None:
    scripted = Scripted(refusal=grpc.StatusCode.UNAVAILABLE)
    async with served(scripted) as target:
        result = await drive(plan_of(target, is_streaming=is_streaming, is_multiplexed=is_multiplexed))
    assert result.errors == {"UNAVAILABLE": len(scripted.asked)}
    assert len(scripted.asked) == result.num_sent == result.num_scheduled


async def test_calls_end_at_their_deadline() -> None:
    async def never(request: Asked) -> list[pb.GenerateResponse]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async with served(Scripted(never)) as target:
        result = await drive(plan_of(target, timeout_s=0.05))
    assert result.errors == {"DEADLINE_EXCEEDED": result.num_sent}
    assert result.num_sent == result.num_scheduled


@pytest.mark.combinations
async def test_processes_together_send_the_whole_plan() -> None:
    scripted = Scripted()
    async with served(scripted) as target:
        plan = plan_of(target, processes=3, check=True)
        result = await asyncio.to_thread(run, plan)
    assert result.num_ok == result.num_sent == len(scripted.asked) == result.num_scheduled
    assert sorted(result.record.scheduled_s) == list(arrivals_of(plan))
    assert len({peer for _, peer, _ in scripted.asked}) == 3
    # Each text's first answer of all has nothing to be compared with.
    assert result.record.num_compared == result.num_ok - len(ASKS)


def test_absent_server_is_reported() -> None:
    with pytest.raises(DriveError, match=r"no connection to 127\.0\.0\.1:1 within 0\.2 s"):
        run(plan_of("127.0.0.1:1", timeout_s=0.2))


@pytest.mark.parametrize("ends_well", [False, True])
async def test_requests_of_a_call_that_ends_early_are_errors_and_the_next_opens_another(ends_well: bool) -> None:
    class Breaking(Scripted):
        async def generate_many(self, messages: Any, context: Any) -> Any:
            async for message in messages:
                self.asked += [(one.request, context.peer(), None) for one in message.requests]
                if not ends_well:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
                return
            yield

    scripted = Breaking()
    async with served(scripted) as target:
        result = await drive(plan_of(target, is_multiplexed=True))
    assert result.errors == {"UNAVAILABLE": result.num_sent}
    assert len(scripted.asked) > 1
