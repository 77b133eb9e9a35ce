"""Faults of the model at random steps, and clocks that jump: one terminal event each, and the server continues."""

import asyncio
import random
from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest

from antiphon.v1 import inference_pb2 as pb
from tests.fakes import FakeClock, FakeRunner
from tests.reliability.answers import check_stream
from tests.reliability.sizes import size
from tests.serving import SOURCE, Gate, Serving, asking, asking_whole, serving, stub_of

pytestmark = pytest.mark.hardship

NUM_CALLS = size("FAULT_CALLS", 60) * 5


class Faults:
    """Raises errors in random encoder runs and decoder steps."""

    def __init__(self, share: float) -> None:
        self.share, self.num_raised = share, 0
        self._rng = random.Random(7)

    def arm(self, runner: FakeRunner) -> None:
        runner.before_encode = lambda sources: self._maybe()
        runner.before_decode = lambda num_rows: self._maybe()

    def _maybe(self) -> None:
        if self._rng.random() < self.share:
            self.num_raised += 1
            raise RuntimeError("the model broke")


async def outcome(served: Serving, number: int) -> str:
    """Return `ok` or the status of a stream, which must end exactly once."""
    heard: list[pb.GenerateResponse] = []
    try:
        async for response in stub_of(served).Generate(asking((3 + number % 20, *SOURCE[1:]))):
            heard.append(response)  # noqa: PERF401 - messages before an error count
    except grpc.aio.AioRpcError as error:
        assert all(one.finish_reason == pb.FINISH_REASON_UNSPECIFIED for one in heard)
        return str(error.code().name)
    check_stream(heard)
    return "ok"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_faults_of_the_model_end_only_the_affected_streams() -> None:
    faults = Faults(0.05)
    async with serving(prepare=faults.arm) as served:
        outcomes = await asyncio.gather(*(outcome(served, number) for number in range(NUM_CALLS)))
        faults.share = 0.0
        again = await outcome(served, 0)
    assert faults.num_raised > 0
    assert set(outcomes) == {"ok", "INTERNAL"}
    assert again == "ok"


async def test_clock_that_jumps_by_a_day_ends_only_requests_with_deadlines() -> None:
    """Like after a suspension of the machine, monotonic time has passed without a step."""
    clock = FakeClock()
    gates: list[Gate] = []
    async with serving(prepare=lambda runner: gates.append(Gate(runner)), clock=clock) as served:
        stub = stub_of(served)
        timed = asyncio.ensure_future(_code(stub.GenerateUnary(asking_whole(time_limit_millis=60_000))))
        bound = asyncio.ensure_future(_code(stub.GenerateUnary(asking_whole(), timeout=600)))
        free = asyncio.ensure_future(_code(stub.GenerateUnary(asking_whole())))
        await asyncio.to_thread(gates[0].reached.wait)
        while served.engine.num_running + served.engine.num_waiting < 3:
            await stub.Tokenize(pb.TokenizeRequest(text="a"))
        clock.advance(86_400)
        gates[0].open()
        assert [await timed, await bound, await free] == ["TIME_LIMIT", "DEADLINE_EXCEEDED", "STOP"]


async def _code(call: Awaitable[pb.GenerateUnaryResponse]) -> str:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return pb.FinishReason.Name(answer.outputs[0].finish_reason).removeprefix("FINISH_REASON_")
