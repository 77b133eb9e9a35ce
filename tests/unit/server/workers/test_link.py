"""Workers: questions and answers over a pair of sockets, shares of the cores, and metrics of all as of one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from antiphon.domain.errors import InvalidArgument, LastModel, Status
from antiphon.domain.request import Priority, Task
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.server.machine import usable_cores
from antiphon.server.settings import ConfigError, ServerConfig
from antiphon.server.workers import division
from antiphon.server.workers.division import BYTES_PER_CORE, divide, neighbours_first, suggested_workers
from antiphon.server.workers.link import Handler, Link, LinkLost, WorkerError
from antiphon.server.workers.merged_metrics import MergedCollector, Totals, WithoutEngines, exposition_of


@contextlib.asynccontextmanager
async def linked(answer: Handler) -> AsyncIterator[tuple[Link, asyncio.Task[None], asyncio.Task[None]]]:
    """Yield the asking end, and the tasks that read both ends."""
    ours, theirs = socket.socketpair()
    asking, answering = await Link.over(ours), await Link.over(theirs, answer)
    tasks = [asyncio.create_task(link.run()) for link in (asking, answering)]
    try:
        yield asking, tasks[0], tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_answers_come_to_their_questions_in_any_order() -> None:
    waits = {"slow": asyncio.Event(), "quick": asyncio.Event()}
    waits["quick"].set()

    async def answer(question: str, value: Any) -> Any:
        await waits[question].wait()
        return [question, value]

    async with linked(answer) as (link, _, _):
        slow = asyncio.create_task(link.call("slow", {"a": 1}))
        assert await link.call("quick", "Ä\n" * 100_000) == ["quick", "Ä\n" * 100_000]
        assert not slow.done()
        waits["slow"].set()
        assert await slow == ["slow", {"a": 1}]


async def test_errors_keep_their_status_reason_and_field() -> None:
    async def answer(question: str, value: Any) -> Any:
        if question == "field":
            raise InvalidArgument("name", "?", "a letter")
        if question == "status":
            raise LastModel("the last one")
        raise RuntimeError("a secret")

    async with linked(answer) as (link, _, _):
        with pytest.raises(InvalidArgument, match="name is '\\?'; it must be a letter") as field:
            await link.call("field")
        assert (field.value.field, field.value.status, field.value.reason) == (
            "name",
            Status.INVALID_ARGUMENT,
            "INVALID_FIELD",
        )
        with pytest.raises(WorkerError, match="the last one") as refused:
            await link.call("status")
        assert (refused.value.status, refused.value.reason) == (Status.FAILED_PRECONDITION, "LAST_MODEL")
        with pytest.raises(WorkerError) as fault:
            await link.call("fault")
        assert (fault.value.status, str(fault.value)) == (Status.INTERNAL, "a worker failed")


async def test_questions_end_when_the_other_end_is_gone() -> None:
    asked = asyncio.Event()

    async def never(question: str, value: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with linked(never) as (link, reading, answering):
        open_question = asyncio.create_task(link.call("anything"))
        await asked.wait()
        answering.cancel()
        with pytest.raises(LinkLost):
            await open_question
        await reading
        with pytest.raises(LinkLost):
            await link.call("more")


async def test_answer_to_a_question_that_was_given_up_is_ignored() -> None:
    go = asyncio.Event()

    async def answer(question: str, value: Any) -> Any:
        if question == "late":
            await go.wait()
        return question

    async with linked(answer) as (link, _, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.call("late"), 0.01)
        go.set()
        assert await link.call("next") == "next"


@pytest.fixture
def seven_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 5, 6, 7, 9})


@pytest.mark.usefixtures("seven_cores")
def test_every_core_belongs_to_one_worker() -> None:
    shares = divide(ServerConfig(workers=3))
    assert sorted(core for share in shares for core in share.cores) == [1, 2, 3, 5, 6, 7, 9]
    assert sorted(share.threads for share in shares) == [2, 2, 3]
    assert [len(share.cores) for share in shares] == [share.threads for share in shares]


@pytest.mark.usefixtures("seven_cores")
def test_threads_are_those_of_the_setting() -> None:
    assert [share.threads for share in divide(ServerConfig(workers=2, threads=5))] == [5, 5]


def test_workers_of_a_container_with_a_quota_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert [(share.cores, share.threads) for share in divide(ServerConfig(workers=2))] == [((), 2), ((), 2)]


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers is 200; it must be at most"):
        divide(ServerConfig(workers=200))


def test_small_models_have_more_workers_than_large_ones() -> None:
    numbers = [suggested_workers(size * BYTES_PER_CORE, 16) for size in (0, 1, 2, 4, 8, 16, 100)]
    assert numbers == [16, 16, 8, 4, 2, 1, 1]
    assert 1 <= len(divide(ServerConfig(workers="auto"))) <= usable_cores()


def test_hardware_threads_of_a_core_are_neighbours(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert neighbours_first(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert neighbours_first([3, 1], tmp_path / "absent") == [1, 3]


class Process:
    """Registry with a family of each kind."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter("answers", "Answers.", ["model_name"], registry=self.registry)
        self.sizes = Histogram("sizes", "Sizes.", ["model_name"], buckets=[1, 2, 5], registry=self.registry)
        self.running = Gauge("antiphon_num_requests_running", "Running.", registry=self.registry)
        self.usage = Gauge("antiphon_kv_cache_usage_ratio", "Usage.", registry=self.registry)
        self.lag = Gauge("antiphon_event_loop_lag_seconds", "Lag.", registry=self.registry)
        self.memory = Gauge("antiphon_model_memory_bytes", "Memory.", registry=self.registry)
        self.expiry = Gauge("antiphon_tls_certificate_expiry_timestamp_seconds", "Expiry.", registry=self.registry)
        Info("build", "Versions.", registry=self.registry).info({"version": "1"})

    def work(self, rng: random.Random, *others: Process) -> None:
        """Count the same in this process and in others."""
        for _ in range(50):
            model, size = rng.choice("ab"), rng.random() * 8
            for one in (self, *others):
                one.answers.labels(model).inc()
                one.sizes.labels(model).observe(size, {"trace_id": f"{size:.3f}"})


def samples(collector: MergedCollector | CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in collector.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def merged(totals: Totals, **processes: Process) -> MergedCollector:
    texts = {name: exposition_of(process.registry) for name, process in processes.items()}
    return MergedCollector(lambda: totals.merged(texts))


def test_counters_and_histograms_equal_those_of_one_process_that_did_everything() -> None:
    rng, whole, one, two = random.Random(0), Process(), Process(), Process()
    one.work(rng, whole)
    two.work(rng, whole)
    found, expected = samples(merged(Totals(), one=one, two=two)), samples(whole.registry)
    for key, value in expected.items():
        if key[0].startswith(("answers", "sizes", "build")):
            assert found[key] == pytest.approx(value)


def test_counters_of_a_process_that_has_ended_are_kept() -> None:
    rng, whole, totals = random.Random(1), Process(), Totals()
    for _ in range(3):
        ended = Process()
        ended.work(rng, whole)
        ended.running.set(5)
        totals.add(exposition_of(ended.registry))
    live = Process()
    live.work(rng, whole)
    found, expected = samples(merged(totals, live=live)), samples(whole.registry)
    counted = {key: value for key, value in expected.items() if key[0].startswith(("answers", "sizes"))}
    assert {key: pytest.approx(found[key]) for key in counted} == counted
    assert found["antiphon_num_requests_running", ()] == 0
    totals.forget("a")
    del counted["answers_total", (("model_name", "a"),)]
    after = samples(merged(totals, live=live))
    assert after["answers_total", (("model_name", "b"),)] == counted["answers_total", (("model_name", "b"),)]
    assert after["answers_total", (("model_name", "a"),)] < expected["answers_total", (("model_name", "a"),)]


def test_gauges_are_summed_or_the_same_or_of_each_worker() -> None:
    one, two = Process(), Process()
    for process, (running, usage, expiry) in ((one, (3, 0.5, 100)), (two, (4, 0.25, 90))):
        process.running.set(running)
        process.usage.set(usage)
        process.lag.set(usage)
        process.expiry.set(expiry)
        process.memory.set(1000)
    found = samples(merged(Totals(), one=one, two=two))
    assert found["antiphon_num_requests_running", ()] == 7
    assert found["antiphon_kv_cache_usage_ratio", ()] == 0.5
    assert found["antiphon_event_loop_lag_seconds", (("worker", "one"),)] == 0.5
    assert found["antiphon_event_loop_lag_seconds", (("worker", "two"),)] == 0.25
    assert found["antiphon_model_memory_bytes", ()] == 1000
    assert found["antiphon_tls_certificate_expiry_timestamp_seconds", ()] == 90


@pytest.mark.parametrize("values", [(math.nan, 2.0), (2.0, math.nan), (1.0, 2.0), (2.0, 1.0)])
def test_value_that_one_worker_does_not_know_is_that_of_the_other(values: tuple[float, float]) -> None:
    one, two = Process(), Process()
    one.memory.set(values[0])
    two.memory.set(values[1])
    assert samples(merged(Totals(), one=one, two=two))["antiphon_model_memory_bytes", ()] == 2.0


def test_exemplars_remain_and_the_result_can_be_scraped_in_both_formats() -> None:
    one = Process()
    one.work(random.Random(2))
    registry = CollectorRegistry()
    registry.register(merged(Totals(), one=one))
    assert "trace_id" in exposition_of(registry)
    again = MergedCollector(lambda: Totals().merged({"x": exposition_of(registry)}))
    assert samples(again)["answers_total", (("model_name", "a"),)] == one.answers.labels("a")._value.get()


def test_gauges_of_models_are_those_of_the_engine_s_process() -> None:
    """Regression: the zero of a front was the larger value where that of the engine is negative."""
    texts = {}
    for name, residual in (("engine", -7.0), ("front", 0.0)):
        registry = CollectorRegistry()
        families = MetricFamilies(registry)
        Metrics(families, "model").submitted(Task.GENERATE, Priority.INTERACTIVE)
        families.workspace.residual.labels("model").set(residual)
        texts[name] = exposition_of(WithoutEngines(registry) if name == "front" else registry)
    merged = {sample.name: sample.value for family in Totals().merged(texts) for sample in family.samples}
    assert merged["antiphon_encoder_workspace_residual_bytes"] == -7.0
    assert "\nantiphon_grpc_server_in_flight" in texts["front"]
    submitted = [
        sample.value
        for family in Totals().merged(texts)
        for sample in family.samples
        if sample.name == "antiphon_requests_submitted_total" and sample.value
    ]
    assert submitted == [2.0]
