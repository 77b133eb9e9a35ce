"""Declaration of metric families: name, help text, labels, buckets, and the rule that merges several processes.

A subclass of `Families` declares each of its families once. Each object of it has these families in one registry.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

PREFIX = "antiphon_"
MODEL_LABEL = "model_name"


class Merge(enum.Enum):
    """Rule that makes one gauge of those of several processes. Counters and histograms are summed."""

    SUM = enum.auto()
    MAX = enum.auto()  # also for values that are the same in all
    MIN = enum.auto()
    EACH = enum.auto()  # with the label of the worker


_Family = TypeVar("_Family", bound=Collector)


class Declaration(Generic[_Family]):
    """Declaration of one family in a subclass of `Families`. In its objects, the attribute is the family.

    create: called with the registry. name: with the prefix. merge: None for counters and histograms.
    is_of_model: has a set of values for each model. is_on_demand: exported only after its first use.
    """

    def __init__(
        self,
        create: Callable[..., _Family],
        name: str,
        *,
        merge: Merge | None = None,
        is_of_model: bool,
        is_on_demand: bool = False,
    ) -> None:
        self._create = create
        self.name = name
        self.merge = merge
        self.is_of_model = is_of_model
        self.is_on_demand = is_on_demand

    def __set_name__(self, owner: type[Families], attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, families: Families, owner: type[Families]) -> _Family:
        # Python finds the object's own attribute first, so this runs only once for each object.
        family = families.__dict__[self.attribute] = self._create(registry=families.registry)
        return family


def counter(name: str, documentation: str, *labels: str) -> Declaration[Counter]:
    """Declare a counter."""
    create = partial(Counter, PREFIX + name, documentation, labels)
    return Declaration(create, PREFIX + name, is_of_model=MODEL_LABEL in labels)


def gauge(name: str, documentation: str, merge: Merge, *labels: str, is_on_demand: bool = False) -> Declaration[Gauge]:
    """Declare a gauge."""
    create = partial(Gauge, PREFIX + name, documentation, labels)
    is_of_model = MODEL_LABEL in labels
    return Declaration(create, PREFIX + name, merge=merge, is_of_model=is_of_model, is_on_demand=is_on_demand)


def model_counter(name: str, documentation: str, *labels: str) -> Declaration[Counter]:
    """Declare a counter with the model's name and further labels."""
    return counter(name, documentation, MODEL_LABEL, *labels)


def model_gauge(name: str, documentation: str, merge: Merge, *labels: str) -> Declaration[Gauge]:
    """Declare a gauge with the model's name and further labels."""
    return gauge(name, documentation, merge, MODEL_LABEL, *labels)


def model_histogram(name: str, documentation: str, buckets: Sequence[float]) -> Declaration[CountedHistogram]:
    """Declare a histogram with the model's name."""
    create = partial(CountedHistogram, PREFIX + name, documentation, label=MODEL_LABEL, buckets=buckets)
    return Declaration(create, PREFIX + name, is_of_model=True)


class Families:
    """Families that a subclass declares, in one registry, in the order of their declarations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        for declaration in self.declarations():
            if not declaration.is_on_demand:
                getattr(self, declaration.attribute)

    @classmethod
    def declarations(cls) -> list[Declaration[Any]]:
        """Return the declarations of this class in their order."""
        return [declaration for declaration in vars(cls).values() if isinstance(declaration, Declaration)]

    @classmethod
    def merge_rules(cls) -> dict[str, Merge]:
        """Return the rule of each gauge by its name."""
        return {
            declaration.name: declaration.merge for declaration in cls.declarations() if declaration.merge is not None
        }

    def remove(self, model_name: str) -> None:
        """Remove the values of one model from every family. Later reports about it are not shown."""
        for declaration in self.declarations():
            if declaration.is_of_model:
                getattr(self, declaration.attribute).remove_by_labels({MODEL_LABEL: model_name})


class CountedHistogram(Collector):
    """Prometheus histogram that counts many equal observations at the cost of one.

    prometheus_client's own histogram counts one observation per call, but a step of the engine makes one for each row.
    This class produces the same samples through the client's public collector interface. It has one label, and only its
    children have observations. Buckets are upper bounds; +Inf is added.
    """

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
