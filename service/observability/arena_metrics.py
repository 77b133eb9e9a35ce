"""What each model's allocator holds, read at every scrape: ONNX Runtime and our own operators work in nothing else.

Of the graphs that answer requests; what shows attention maps (`explain.py`) has sessions, and memory, of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from antiphon.model.ops.workspace import Workspace

_GAUGES = {
    "in_use_bytes": "Bytes that the model's graphs hold of their allocator: what a run works in; no mapped weights.",
    "reserved_bytes": "Bytes that the allocator holds of the operating system: in use, rounded up, and cached.",
    "cached_bytes": "Bytes that the allocator holds and nobody uses.",
    "limit_bytes": "Bound of the reserved bytes; 0 is none.",
    "peak_bytes": "Most bytes that were ever in use at once.",
}
_COUNTERS = {
    "allocations": "Blocks that the allocator gave.",
    "refusals": "Blocks that it could not give, for its limit or the operating system's.",
}


class ArenaMetrics(Collector):
    """Samples of the allocators it is told to watch."""

    def __init__(self, prefix: str, label: str, registry: CollectorRegistry) -> None:
        self._prefix = f"{prefix}arena_"
        self._label = label
        self._watched: dict[str, Workspace] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def watch(self, model_name: str, workspace: Workspace) -> None:
        """Show an allocator under a model's name, and keep it alive until that is removed."""
        with self._lock:
            self._watched[model_name] = workspace

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Show and keep a model's allocator no longer."""
        with self._lock:
            self._watched.pop(labels[self._label], None)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Render the samples; called by the registry."""
        with self._lock:
            watched = list(self._watched.items())
        read = [(name, workspace.stats(), workspace.highest_bytes) for name, workspace in watched]
        for field, documentation in _GAUGES.items():
            gauge = GaugeMetricFamily(self._prefix + field, documentation, labels=[self._label])
            for name, stats, highest in read:
                gauge.add_metric([name], float(highest if field == "peak_bytes" else getattr(stats, field)))
            yield gauge
        for field, documentation in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + field, documentation, labels=[self._label])
            for name, stats, _ in read:
                counter.add_metric([name], float(getattr(stats, field)))
            yield counter
