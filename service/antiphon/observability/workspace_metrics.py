"""Metrics of memory that a model's graphs use: the encoder's workspace, and the allocators."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.bundle.manifest import MemoryFit
from antiphon.observability.families import (
    MODEL_LABEL,
    PREFIX,
    Families,
    Merge,
    model_counter,
    model_gauge,
    model_histogram,
)
from antiphon.ops.workspace import Workspace, WorkspaceStats
from antiphon.runtime.runner import EncodeReport

WORKSPACE_BUCKETS_BYTES = tuple(4**power * 1024 for power in range(3, 13))  # 64 KiB to 16 GiB
# Measured over predicted bytes. Not their difference, because OpenMetrics allows no buckets below 0.
QUOTIENT_BUCKETS = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)

# In tokens. Each bound is twice the one before, so memory that grows with T² quadruples. The set of lengths is fixed,
# so the label cannot grow with traffic.
LENGTH_BOUNDS = tuple(2**power for power in range(4, 14))
LENGTHS = (*map(str, LENGTH_BOUNDS), "+Inf")
KINDS = ("measured", "predicted_fused", "predicted_materialised")


class WorkspaceFamilies(Families):
    """Families of the encoder's workspace: predicted and measured bytes, by run and by source length."""

    materialised = model_gauge(
        "encoder_workspace_predicted_materialised_bytes",
        "Size of one layer's score matrices without fused attention, last encoder run: the sum of H * S^2 * w.",
        Merge.MAX,
    )
    fused = model_gauge(
        "encoder_workspace_predicted_fused_bytes",
        "Workspace that the bundle's fit predicts for the last encoder run.",
        Merge.MAX,
    )
    measured = model_gauge(
        "encoder_workspace_measured_bytes", "Peak workspace measured in the last encoder run.", Merge.MAX
    )
    measured_max = model_gauge(
        "encoder_workspace_measured_max_bytes", "Largest peak workspace measured in any encoder run.", Merge.MAX
    )
    residual = model_gauge(
        "encoder_workspace_residual_bytes",
        "Measured minus predicted (fused) workspace of the last encoder run.",
        Merge.MAX,
    )
    materialised_runs = model_histogram(
        "encoder_workspace_predicted_materialised_run_bytes",
        "The same score matrices, of every encoder run.",
        WORKSPACE_BUCKETS_BYTES,
    )
    fused_runs = model_histogram(
        "encoder_workspace_predicted_fused_run_bytes",
        "The fit's prediction, of every encoder run.",
        WORKSPACE_BUCKETS_BYTES,
    )
    measured_runs = model_histogram(
        "encoder_workspace_measured_run_bytes",
        "Peak workspace measured, of every encoder run.",
        WORKSPACE_BUCKETS_BYTES,
    )
    quotient_runs = model_histogram(
        "encoder_workspace_measured_to_predicted_ratio",
        "Measured divided by predicted (fused) workspace of every encoder run.",
        QUOTIENT_BUCKETS,
    )
    fit = model_gauge(
        "encoder_workspace_fit_coefficient",
        "Terms a, b and c of the bundle's fit of an encoder run's workspace, a + B * (b * T + c * T^2) bytes.",
        Merge.MAX,
        "term",
    )
    fit_residual = model_gauge(
        "encoder_workspace_fit_residual_ratio",
        "Largest relative error of the bundle's fit at its measured points.",
        Merge.MAX,
    )
    lone_runs = model_counter(
        "encoder_lone_runs", "Encoder runs with a single source, by length: up to source_len tokens.", "source_len"
    )
    lone_tokens = model_counter("encoder_lone_tokens", "Source tokens of those runs.", "source_len")
    lone_workspace = model_counter(
        "encoder_lone_workspace_bytes",
        "Sums over those runs: workspace measured, predicted (fused), and score matrices if stored (materialised).",
        "source_len",
        "kind",
    )


class WorkspaceMetrics:
    """Reports of the encoder's workspace of one model. For the engine's thread."""

    def __init__(self, families: WorkspaceFamilies, name: str) -> None:
        self._families = families
        self._name = name
        self._max_measured_bytes = 0
        self._materialised = families.materialised.labels(name)
        self._fused = families.fused.labels(name)
        self._measured = families.measured.labels(name)
        self._measured_max = families.measured_max.labels(name)
        self._residual = families.residual.labels(name)
        self._materialised_runs = families.materialised_runs.labels(name)
        self._fused_runs = families.fused_runs.labels(name)
        self._measured_runs = families.measured_runs.labels(name)
        self._quotient_runs = families.quotient_runs.labels(name)
        self._lone_runs = [families.lone_runs.labels(name, length) for length in LENGTHS]
        self._lone_tokens = [families.lone_tokens.labels(name, length) for length in LENGTHS]
        self._lone_bytes = [
            {kind: families.lone_workspace.labels(name, length, kind) for kind in KINDS} for length in LENGTHS
        ]

    def predicts_by(self, fit: MemoryFit) -> None:
        """Report the fit that predicts the workspace."""
        for term, value in (("a", fit.a), ("b", fit.b), ("c", fit.c)):
            self._families.fit.labels(self._name, term).set(value)
        self._families.fit_residual.labels(self._name).set(fit.residual)

    def encoded(self, report: EncodeReport) -> None:
        """Report the workspace of an encoder run."""
        measured, predicted = report.peak_workspace_bytes, report.predicted_fused_bytes
        self._count_by_length(report)
        self._materialised.set(report.predicted_materialised_bytes)
        self._materialised_runs.observe(report.predicted_materialised_bytes)
        if predicted is not None:
            self._fused.set(predicted)
            self._fused_runs.observe(predicted)
        if measured is not None:
            self._measured.set(measured)
            self._measured_runs.observe(measured)
            self._max_measured_bytes = max(self._max_measured_bytes, measured)
            self._measured_max.set(self._max_measured_bytes)
        if measured is not None and predicted is not None:
            self._residual.set(measured - predicted)
            self._quotient_runs.observe(measured / predicted if predicted else 1.0)

    def _count_by_length(self, report: EncodeReport) -> None:
        """Count a run under the length of its source. The workspace of several sources belongs to no single length."""
        if report.rows != 1:
            return
        index = bisect_left(LENGTH_BOUNDS, report.longest)
        self._lone_runs[index].inc()
        self._lone_tokens[index].inc(report.longest)
        sizes = (report.peak_workspace_bytes, report.predicted_fused_bytes, report.predicted_materialised_bytes)
        for kind, num_bytes in zip(KINDS, sizes, strict=True):
            if num_bytes is not None:
                self._lone_bytes[index][kind].inc(num_bytes)


_ARENA = f"{PREFIX}arena_"
# All of them are sums over processes, each of which has allocators of its own.
_ARENA_GAUGES = {
    "in_use_bytes": "Bytes that the model's graphs use of their allocator for running; without mapped weights.",
    "reserved_bytes": "Bytes that the allocator has from the operating system: in use, rounded up, and cached.",
    "cached_bytes": "Bytes that the allocator has and that are not in use.",
    "limit_bytes": "Limit of the reserved bytes; 0 is no limit.",
    "peak_bytes": "Largest number of bytes ever in use.",
}
_ARENA_COUNTERS = {
    "allocations": "Blocks that were allocated.",
    "refusals": "Allocations that failed because of the allocator's limit or the operating system's.",
}
ARENA_MERGE_RULES = {_ARENA + field: Merge.SUM for field in _ARENA_GAUGES}


class ArenaMetrics(Collector):
    """Metrics of each model's allocator, read at every scrape. ONNX Runtime and our own operators use no other one.

    Covers the graphs that answer requests. Attention maps (`explain.py`) have separate sessions and memory.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._watched: dict[str, Sequence[Workspace]] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def watch(self, model_name: str, workspaces: Sequence[Workspace]) -> None:
        """Report the sums of a model's allocators, one for each lane, and keep them alive until it is removed."""
        with self._lock:
            self._watched[model_name] = workspaces

    def remove(self, model_name: str) -> None:
        """Stop reporting a model's allocators, and release them."""
        with self._lock:
            self._watched.pop(model_name, None)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the samples; called by the registry."""
        with self._lock:
            watched = list(self._watched.items())
        read = [(name, [arena.stats() for arena in arenas]) for name, arenas in watched]
        for field, documentation in _ARENA_GAUGES.items():
            gauge = GaugeMetricFamily(_ARENA + field, documentation, labels=[MODEL_LABEL])
            counted = "highest_bytes" if field == "peak_bytes" else field
            for name, stats in read:
                gauge.add_metric([name], float(_total(stats, counted)))
            yield gauge
        for field, documentation in _ARENA_COUNTERS.items():
            counter = CounterMetricFamily(_ARENA + field, documentation, labels=[MODEL_LABEL])
            for name, stats in read:
                counter.add_metric([name], float(_total(stats, field)))
            yield counter


def _total(stats: Sequence[WorkspaceStats], field: str) -> int:
    return sum(getattr(arena, field) for arena in stats)
