"""Metrics of each model's allocator, read at every scrape. ONNX Runtime and our own operators use no other one.

Covers the graphs that answer requests. Attention maps (`explain.py`) have separate sessions and memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.ops.workspace import Workspace, WorkspaceStats

_GAUGES = {
    "in_use_bytes": "Bytes that the model's graphs use of their allocator for running; without mapped weights.",
    "reserved_bytes": "Bytes that the allocator has from the operating system: in use, rounded up, and cached.",
    "cached_bytes": "Bytes that the allocator has and that are not in use.",
    "limit_bytes": "Limit of the reserved bytes; 0 is no limit.",
    "peak_bytes": "Largest number of bytes ever in use.",
}
_COUNTERS = {
    "allocations": "Blocks that were allocated.",
    "refusals": "Allocations that failed because of the allocator's limit or the operating system's.",
}


class ArenaMetrics(Collector):
    """Collector of samples from watched allocators."""

    def __init__(self, prefix: str, label: str, registry: CollectorRegistry) -> None:
        self._prefix = f"{prefix}arena_"
        self._label = label
        self._watched: dict[str, Sequence[Workspace]] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def watch(self, model_name: str, workspaces: Sequence[Workspace]) -> None:
        """Report the sums of a model's allocators, one for each lane, and keep them alive until it is removed."""
        with self._lock:
            self._watched[model_name] = workspaces

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Stop reporting a model's allocator, and release it."""
        with self._lock:
            self._watched.pop(labels[self._label], None)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the samples; called by the registry."""
        with self._lock:
            watched = list(self._watched.items())
        read = [
            (name, [one.stats() for one in workspaces], sum(one.highest_bytes for one in workspaces))
            for name, workspaces in watched
        ]
        for field, documentation in _GAUGES.items():
            gauge = GaugeMetricFamily(self._prefix + field, documentation, labels=[self._label])
            for name, stats, highest in read:
                gauge.add_metric([name], float(highest if field == "peak_bytes" else _total(stats, field)))
            yield gauge
        for field, documentation in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + field, documentation, labels=[self._label])
            for name, stats, _ in read:
                counter.add_metric([name], float(_total(stats, field)))
            yield counter


def _total(stats: Sequence[WorkspaceStats], field: str) -> int:
    return sum(getattr(one, field) for one in stats)
