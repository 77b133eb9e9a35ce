"""Metric families with the label model_name, as vLLM's families have. Refuses labels that grow with traffic."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from antiphon.observability.metrics.histogram import CountedHistogram

PREFIX = "antiphon_"
MODEL_LABEL = "model_name"


class ModelFamilies:
    """Creates the families of a registry that have one set of values per model, and removes a model's values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._all: list[Counter | Gauge | CountedHistogram] = []

    def remove(self, model_name: str) -> None:
        """Remove the values of one model from every family."""
        for family in self._all:
            family.remove_by_labels({MODEL_LABEL: model_name})

    def counter(self, name: str, documentation: str, *labels: str) -> Counter:
        """Create a counter with the model's name and further labels."""
        family = Counter(PREFIX + name, documentation, (MODEL_LABEL, *labels), registry=self._registry)
        self._all.append(family)
        return family

    def gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        """Create a gauge with the model's name and further labels."""
        family = Gauge(PREFIX + name, documentation, (MODEL_LABEL, *labels), registry=self._registry)
        self._all.append(family)
        return family

    def histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> CountedHistogram:
        """Create a histogram with the model's name."""
        family = CountedHistogram(
            PREFIX + name, documentation, label=MODEL_LABEL, buckets=buckets, registry=self._registry
        )
        self._all.append(family)
        return family
