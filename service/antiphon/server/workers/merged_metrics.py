"""Metrics of several processes as those of one server.

Counters and histograms are summed, also over processes that have ended, so that they never decrease. Gauges that
describe one process have a label with the worker; for the others, the declaration of each has a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from antiphon.observability.families import MODEL_LABEL, Merge
from antiphon.observability.metrics import MERGE_RULES

WORKER_LABEL = "worker"

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Totals:
    """Sums of processes that have ended."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, exposition: str) -> None:
        """Add the counters and histograms of a process."""
        kept = [family for family in _families(exposition) if family.type in ("counter", "histogram", "summary")]
        self._families = {family.name: family for family in _merged([("", [*self._families.values(), *kept])])}

    def forget(self, model: str) -> None:
        """Remove the samples of a model that is served no more."""
        for family in self._families.values():
            family.samples = [sample for sample in family.samples if sample.labels.get(MODEL_LABEL) != model]

    def merged(self, expositions: Mapping[str, str]) -> list[Metric]:
        """Return the metrics of all processes, with those that have ended. expositions: by label of the worker."""
        sources: list[tuple[str, Iterable[Metric]]] = [("", self._families.values())]
        sources += [(worker, _families(text)) for worker, text in expositions.items()]
        return _merged(sources)


class MergedCollector(Collector):
    """Collects the metrics of all processes at each scrape."""

    def __init__(self, collect: Callable[[], list[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """Yield every family once."""
        yield from self._collect()


def _families(exposition: str) -> list[Metric]:
    return list(text_string_to_metric_families(exposition)) if exposition else []  # type: ignore[no-untyped-call]


def _merged(sources: Iterable[tuple[str, Iterable[Metric]]]) -> list[Metric]:
    merged: dict[str, Metric] = {}
    samples: dict[str, dict[_Key, Sample]] = {}
    for worker, families in sources:
        for family in families:
            if family.name not in merged:
                merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
                samples[family.name] = {}
            for sample in family.samples:
                _add(samples[family.name], sample, _rule(family, sample), worker)
    for name, family in merged.items():
        family.samples = list(samples[name].values())
    return list(merged.values())


def _rule(family: Metric, sample: Sample) -> Merge:
    if sample.name.endswith("_created"):
        return Merge.MIN
    if family.type in ("counter", "histogram", "summary"):
        return Merge.SUM
    return MERGE_RULES.get(family.name, Merge.MAX)


def _add(samples: dict[_Key, Sample], sample: Sample, rule: Merge, worker: str) -> None:
    labels = sample.labels | {WORKER_LABEL: worker} if rule is Merge.EACH else sample.labels
    key = (sample.name, tuple(sorted(labels.items())))
    value, exemplar = sample.value, sample.exemplar
    if (before := samples.get(key)) is not None:
        value = _merged_value(rule, before.value, value)
        exemplar = exemplar or before.exemplar
    samples[key] = Sample(sample.name, labels, value, sample.timestamp, exemplar)


def _merged_value(rule: Merge, first: float, second: float) -> float:
    """Return the value of two processes. A value that one of them does not know (NaN) is that of the other."""
    if math.isnan(first) or math.isnan(second):
        return second if math.isnan(first) else first
    match rule:
        case Merge.SUM:
            return first + second
        case Merge.MIN:
            return min(first, second)
        case _:
            return max(first, second)


def exposition_of(registry: Collector) -> str:
    """Return the metrics of a registry in the OpenMetrics format."""
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


class WithoutEngines(Collector):
    """Metrics of a process without engines: the gauges of its models would be zeros beside those of the engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield every family, the gauges without the samples of models."""
        for family in self._registry.collect():
            if family.type == "gauge":
                family.samples = [sample for sample in family.samples if MODEL_LABEL not in sample.labels]
            yield family
