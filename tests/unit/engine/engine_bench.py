"""Engine with a real thread over the fake model, a gate that blocks its steps, and readers of its streams."""

import asyncio
import threading
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from tests.fakes import FakeRunner, limits_for, request_of

TIMEOUT_S = 30.0  # of a broken test; a passing test does not wait for it


class Gate:
    """Blocks the decoder until opened, or for single steps, one for each ticket."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self._tickets = threading.Semaphore(0)
        self._is_open = threading.Event()

    def __call__(self, num_rows: int) -> None:
        self.arrived.release()
        if not self._is_open.is_set():
            assert self._tickets.acquire(timeout=TIMEOUT_S)

    def step(self) -> None:
        self._tickets.release()

    def open(self) -> None:
        self._is_open.set()
        self._tickets.release()


class Bench:
    """Engine over the fake model, and readers of its streams."""

    def __init__(
        self, runner: FakeRunner, limits: EngineLimits | None = None, *, further: Sequence[FakeRunner] = ()
    ) -> None:
        self.runner = runner
        self.runners = (runner, *further)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(MetricFamilies(self.registry), "fake")
        self.engine = Engine(runner, limits or limits_for(runner), self.metrics, more_runners=further)

    def submit(
        self, name: str, source: tuple[int, ...], params: SamplingParams | None = None, *, within_s: float | None = None
    ) -> OutputStream:
        stream = OutputStream(name, coalesce_s=0.0)
        self.engine.submit(self.request(name, source, params, within_s=within_s), stream)
        return stream

    def request(
        self, name: str, source: tuple[int, ...], params: SamplingParams | None = None, *, within_s: float | None = None
    ) -> Request:
        now_s = self.engine.clock()
        deadline_s = None if within_s is None else now_s + within_s
        return request_of(name, source, params=params, arrival_s=now_s, deadline_s=deadline_s)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"antiphon_{name}", {"model_name": "fake", **labels})


async def read(stream: OutputStream) -> list[TokenEvent]:
    async with asyncio.timeout(TIMEOUT_S):
        return [event async for event in stream]


async def arrive(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.arrived.acquire, timeout=TIMEOUT_S)
