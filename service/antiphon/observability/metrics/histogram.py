"""Prometheus histogram that counts many equal observations at the cost of one.

prometheus_client's own histogram counts one observation per call, but a step of the engine makes one for each row. This
class produces the same samples through the client's public collector interface.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString


class CountedHistogram(Collector):
    """Histogram with one label. Only its children have observations. Buckets are upper bounds; +Inf is added."""

    def __init__(
        self, name: str, documentation: str, *, label: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets of {name} are {buckets}; they must rise")
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = [*buckets, math.inf]
        self._children: dict[str, Observations] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def labels(self, value: str) -> Observations:
        """Return the observations under one value of the label."""
        with self._lock:
            return self._children.setdefault(value, Observations(self._bounds))

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Remove the observations under one value of the label, as the client's own metrics do."""
        with self._lock:
            self._children.pop(labels[self._label], None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the samples; called by the registry."""
        with self._lock:
            children = list(self._children.items())
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        bounds = list(map(floatToGoString, self._bounds))
        for value, child in children:
            counts, total, exemplars = child.read()
            cumulated = map(float, itertools.accumulate(counts))
            buckets = list(map(_bucket, bounds, cumulated, exemplars))
            family.add_metric([value], buckets, total)
        yield family


Bucket = tuple[str, float] | tuple[str, float, Exemplar]


def _bucket(bound: str, count: float, exemplar: Exemplar | None) -> Bucket:
    return (bound, count) if exemplar is None else (bound, count, exemplar)


class Observations:
    """Counts of one label value. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * len(bounds)
        self._lock = threading.Lock()

    def observe(self, value: float, count: int = 1, *, trace_id: str = "") -> None:
        """Add `count` observations of one value. One with a trace_id becomes the exemplar of its bucket."""
        index = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += count
            self._sum += value * count
            if trace_id:
                self._exemplars[index] = Exemplar({"trace_id": trace_id}, value, time.time())

    def read(self) -> tuple[list[int], float, list[Exemplar | None]]:
        """Return the count of each bucket, not accumulated, the sum of all values, and each bucket's last exemplar."""
        with self._lock:
            return list(self._counts), self._sum, list(self._exemplars)
