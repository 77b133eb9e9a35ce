"""Metrics of several processes as those of one, against one registry that counts everything."""

from __future__ import annotations

import math
import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from antiphon.server.workers.merged_metrics import MergedCollector, Totals, exposition_of


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
