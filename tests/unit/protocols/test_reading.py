"""Cause of a client's departure, with a real engine thread around the fake model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import DeadlineExceeded
from antiphon.domain.request import Request
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.call import CallRecord
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.v1.streaming import cancelled_on_error
from tests.fakes import FakeClock, FakeRunner, limits_for, request_of, source_of


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        metrics = Metrics(MetricFamilies(self.registry), "fake")
        self.runner = FakeRunner()
        self.engine = Engine(self.runner, limits_for(self.runner), metrics, clock=self.clock)
        self.engine.start()

    def ask(self, *, within_s: float | None = None) -> tuple[Request, OutputStream]:
        deadline_s = None if within_s is None else self.clock() + within_s
        request = request_of("a", source_of(target_len=3), arrival_s=self.clock(), deadline_s=deadline_s)
        stream = OutputStream("a")
        self.engine.submit(request, stream)
        return request, stream

    def counted(self) -> dict[str, float]:
        """Return cancellations by cause, and deadline misses, of complete answers."""
        return {
            sample.labels.get("cause", "late"): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.labels.get("stage") == "streaming" and sample.name.endswith("_total") and sample.value
        }


def record_of_call() -> CallRecord:
    return CallRecord(method="m", request_id="r", arrival_s=0.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.stop()
    assert bench.engine.num_free_blocks == bench.engine.num_blocks


@pytest.mark.parametrize(
    ("error", "within_s", "passed_s", "counted"),
    [
        (asyncio.CancelledError(), None, 0.0, {"client": 1.0}),
        (asyncio.CancelledError(), 10.0, 5.0, {"client": 1.0}),
        (asyncio.CancelledError(), 10.0, 10.0, {"late": 1.0}),
        (asyncio.CancelledError(), 10.0, 9.9, {"late": 1.0}),  # the client's own time limit passed first
        (grpc.aio.InternalError("the batch failed"), None, 0.0, {"client": 1.0}),
        (RuntimeError("a bug"), None, 0.0, {"fault": 1.0}),
        (DeadlineExceeded("by the engine, which has counted it"), None, 0.0, {}),
    ],
)
async def test_reading_reports_why_an_answer_was_not_read_to_its_end(
    bench: Bench, error: BaseException, within_s: float | None, passed_s: float, counted: dict[str, float]
) -> None:
    request, stream = bench.ask(within_s=within_s)

    async def leave_unread() -> None:
        with cancelled_on_error(bench.engine, request, stream, record_of_call()):
            await stream.collect()
            bench.clock.advance(passed_s)
            raise error

    with pytest.raises(type(error)):
        await leave_unread()
    assert bench.counted() == counted


async def test_reading_to_the_end_counts_nothing(bench: Bench) -> None:
    request, stream = bench.ask()
    with cancelled_on_error(bench.engine, request, stream, record_of_call()):
        await stream.collect()
    assert bench.counted() == {}


async def test_reading_counts_an_end_by_the_engine_once(bench: Bench) -> None:
    held = threading.Event()

    def hold(num_rows: int) -> None:
        assert held.wait(30)

    bench.runner.before_decode = hold
    request, stream = bench.ask(within_s=1.0)

    async def read_until_cancelled() -> None:
        with cancelled_on_error(bench.engine, request, stream, record_of_call()):
            await stream.collect()
            raise asyncio.CancelledError  # like gRPC at the same moment

    bench.clock.advance(1.0)
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await read_until_cancelled()
    assert bench.counted() == {}
    assert bench.engine.drain(30)
    misses = [
        sample.value
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "antiphon_deadline_misses_total" and sample.value
    ]
    assert misses == [1.0]
