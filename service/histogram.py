"""A Prometheus histogram that takes many equal observations at the price of one.

prometheus_client's own counts one observation a call; a step of the engine makes as many as it has rows. This one
renders the same samples through the client's public collector interface.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CountedHistogram(Collector):
    """A histogram without labels; buckets are upper bounds, +Inf is added."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets of {name} are {buckets}; they must rise")
        self._name = name
        self._documentation = documentation
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._lock = threading.Lock()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of one value."""
        index = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += count
            self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Render the samples; called by the registry."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)
