"""A hung engine as probes, metrics and log report it, a delayed event loop, and the test run before serving."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from antiphon.architecture.heads import HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.engine.engine import Engine, Heartbeat
from antiphon.engine.stream import OutputStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.background import running_in_background
from antiphon.rpc.standard_services import LIVENESS, Probes
from antiphon.rpc.v1.models import LoadedModel
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.warm_up import NotFinite, warm_up
from antiphon.server.models.loading import SharedResources, StartupError, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from antiphon.server.watch import LoopLag, Watchdog
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID, FakeClock, FakeRunner, limits_for, request_of, source_of
from tests.serving import Gate

SERVING, NOT_SERVING = 1, 2
TIMEOUT_S = 10.0


class Bench:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        metrics = Metrics(MetricFamilies(self.registry), "fake")
        self.runner = FakeRunner()
        self.gate = Gate(self.runner)
        self.engine = Engine(self.runner, limits_for(self.runner), metrics, clock=self.clock)
        self._health = health.aio.HealthServicer()
        self.probes = Probes(self._health, ("service",))
        unread: Any = None
        served = LoadedModel(
            name="fake",
            precision="float32",
            servicer=unread,
            engine=self.engine,
            description=pb.Model(name="fake"),
            metrics=metrics,
        )
        self.watchdog = Watchdog([served], self.probes, TIMEOUT_S)

    def ask(self) -> OutputStream:
        stream = OutputStream("a")
        self.engine.submit(request_of("a", source_of(target_len=3), arrival_s=self.clock()), stream)
        return stream

    def status(self, name: str) -> int:
        servicer: Any = self._health  # its RPC Check would need a server
        return int(servicer._server_status[name])

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"antiphon_{name}", {"model_name": "fake"})


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.probes.start()
    await bench.probes.ready()
    bench.engine.start()
    yield bench
    bench.gate.open()
    await asyncio.to_thread(bench.engine.stop)


async def test_watchdog_fails_liveness_while_a_step_hangs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    stream = bench.ask()
    assert await asyncio.to_thread(bench.gate.reached.wait, 30)
    bench.clock.advance(TIMEOUT_S)
    await bench.watchdog.check()
    assert (bench.status(LIVENESS), bench.sample("engine_stuck")) == (SERVING, 0)
    bench.clock.advance(0.1)
    for _ in range(3):  # repeated checks log no second record
        await bench.watchdog.check()
    assert {bench.status(name) for name in (LIVENESS, "", "service")} == {NOT_SERVING}
    assert bench.sample("engine_stuck") == 1
    assert bench.sample("engine_last_step_age_seconds") == pytest.approx(TIMEOUT_S + 0.1)
    (report,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "in _pass" in report.getMessage()  # the stack of the hung thread
    bench.gate.open()
    await stream.collect()
    assert await asyncio.to_thread(bench.engine.drain, 30)
    await bench.watchdog.check()
    assert {bench.status(name) for name in (LIVENESS, "", "service")} == {SERVING}
    assert bench.sample("engine_stuck") == 0


async def test_watchdog_reports_an_idle_engine_as_healthy(bench: Bench) -> None:
    bench.clock.advance(100 * TIMEOUT_S)
    await bench.watchdog.check()
    assert bench.status(LIVENESS) == SERVING


def test_heartbeat_age_counts_from_the_oldest_work_that_has_not_begun() -> None:
    clock = FakeClock()
    heartbeat = Heartbeat(clock)
    clock.advance(5.0)
    assert heartbeat.busy_s == 0.0
    heartbeat.wake()
    clock.advance(2.0)
    heartbeat.wake()  # more work does not make the first younger
    assert heartbeat.busy_s == 2.0
    heartbeat.beat()
    assert heartbeat.busy_s == 0.0
    clock.advance(1.0)
    assert heartbeat.busy_s == 1.0
    clock.advance(-3.0)
    assert heartbeat.busy_s == 0.0
    heartbeat.rest()
    assert heartbeat.busy_s == 0.0


async def test_liveness_stays_serving_when_the_server_drains(bench: Bench) -> None:
    await bench.probes.announce("m", SERVING)
    assert (bench.status(""), bench.status("service/m")) == (SERVING, SERVING)
    await bench.probes.leave()
    await bench.probes.announce("m", SERVING)
    assert {bench.status(name) for name in ("", "service", "service/m")} == {NOT_SERVING}
    assert bench.status(LIVENESS) == SERVING


async def test_background_task_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    async with running_in_background(fail()):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL]


async def test_loop_lag_grows_while_the_loop_is_blocked() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    async with running_in_background(lag.run()):
        await asyncio.sleep(0)
        clock.advance(0.5)
        assert lag.lag_s == 0.0
        clock.advance(3.0)
        assert lag.lag_s == 3.0


HEADS: dict[HeadTask, HeadConfig] = {"classify": HeadConfig(task="classify", labels=("a", "b"))}


@pytest.mark.parametrize(
    ("runner", "num_rows"),
    [
        (FakeRunner(), 8),
        (FakeRunner(max_rows=1), 1),
        (FakeRunner(max_source_len=4, max_target_len=4, block_size=4), 8),
        (FakeRunner(max_rows=8, num_blocks=7, block_size=16), 3),
        (FakeRunner(has_encoder=False), 8),
        (FakeRunner(has_encoder=False, num_blocks=3), 3),
    ],
)
def test_warm_up_runs_every_row_that_fits(runner: FakeRunner, num_rows: int) -> None:
    """The fake model raises if its contract is broken."""
    warm_up(runner)
    assert runner.decoded_rows == [num_rows]
    assert [len(sources) for sources in runner.encoded] == ([1, num_rows] if runner.facts.has_encoder else [])


def test_warm_up_runs_every_head_of_an_encoder_only_model() -> None:
    runner, asked = FakeRunner(has_decoder=False, heads=HEADS), []
    run_head = runner.run_head

    def noted(task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        asked.append(task)
        return run_head(task, states)

    runner.run_head = noted  # type: ignore[method-assign]
    warm_up(runner)
    assert asked == ["classify"]


def test_warm_up_names_the_graph_whose_outputs_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeRunner()
    decoder.overrides[(EOS_ID,)] = np.full(decoder.facts.vocab_size, np.nan, np.float32)
    encoder, head = FakeRunner(), FakeRunner(has_decoder=False, heads=HEADS)
    monkeypatch.setattr(encoder, "memory", lambda source: np.full((len(source), 4), np.inf, np.float32))
    monkeypatch.setattr(head, "head_outputs", lambda task, states: np.full((len(states), 2), np.nan, np.float32))
    for runner, part in ((decoder, "decoder"), (encoder, "encoder"), (head, "classify")):
        with pytest.raises(NotFinite) as caught:
            warm_up(runner)
        assert caught.value.part == part


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_load_names_the_graph_file_whose_outputs_are_not_finite(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(runner: object) -> None:
        raise NotFinite(part)

    monkeypatch.setattr("antiphon.server.models.loading.warm_up", fail)
    budget = MemoryBudget(None)
    shared = SharedResources(families=MetricFamilies(CollectorRegistry()), pacing=Pacing(1.0), budget=budget)
    with pytest.raises(StartupError, match=rf"{part}[a-z0-9.]*\.onnx: the outputs of the {part} graph are not finite"):
        load(ServerConfig(threads=1, max_num_seqs=1).plans[0], shared)
    assert not budget.reserved
