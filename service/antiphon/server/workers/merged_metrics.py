"""Metrics of several processes as those of one server.

Counters and histograms are summed, also over processes that have ended, so that they never decrease. Gauges that
describe one process have a label with the worker; for the others, `GAUGES` has a rule.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from antiphon.observability.metrics.model_families import MODEL_LABEL, PREFIX

WORKER_LABEL = "worker"

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Merge(enum.Enum):
    """Rule that makes one gauge of those of several processes."""

    SUM = enum.auto()
    MAX = enum.auto()  # also for values that are the same in all
    MIN = enum.auto()
    EACH = enum.auto()  # with the label of the worker


_SUMMED = (
    *("calls_waiting_for_client", "grpc_server_in_flight", "unsent_answer_bytes", "kv_cache_blocks", "kv_cache_bytes"),
    *("num_requests_running", "num_requests_waiting", "num_requests_preempted", "num_tokens_waiting"),
    *("arena_cached_bytes", "arena_in_use_bytes", "arena_limit_bytes", "arena_peak_bytes", "arena_reserved_bytes"),
    *("workers_serving", "workers_configured"),  # of the supervisor only
)
# Not those that alerts and autoscalers compare with sums: of an engine that hangs or a full cache, the worst counts.
_OF_EACH = ("event_loop_lag_seconds",)
_OF_EACH_PROCESS = ("virtual_memory_bytes", "open_fds", "max_fds", "start_time_seconds")
_WORKSPACE = (
    *("fit_coefficient", "fit_residual_ratio", "measured_bytes", "measured_max_bytes", "residual_bytes"),
    *("predicted_fused_bytes", "predicted_materialised_bytes"),
)
_LARGEST = (
    *("build_info", "model_info", "model_memory_bytes", "memory_budget_bytes", "machine_memory_bytes"),
    *("engine_last_step_age_seconds", "engine_stuck", "kv_cache_usage_ratio"),
    *("connections_full", "expected_wait_seconds", *(f"encoder_workspace_{name}" for name in _WORKSPACE)),
)
GAUGES: Mapping[str, Merge] = {
    **{PREFIX + name: Merge.SUM for name in _SUMMED},
    **{PREFIX + name: Merge.EACH for name in _OF_EACH},
    **{f"process_{name}": Merge.EACH for name in _OF_EACH_PROCESS},
    **{PREFIX + name: Merge.MAX for name in _LARGEST},
    "process_resident_memory_bytes": Merge.SUM,  # `resident.py` replaces it
    f"{PREFIX}tls_certificate_expiry_timestamp_seconds": Merge.MIN,
}
"""Rule of each gauge. Families of other packages, which have none, are the same in all processes."""


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
            family.samples = [one for one in family.samples if one.labels.get(MODEL_LABEL) != model]

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
    found: dict[str, Metric] = {}
    samples: dict[str, dict[_Key, Sample]] = {}
    for worker, families in sources:
        for family in families:
            if family.name not in found:
                found[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
                samples[family.name] = {}
            for sample in family.samples:
                _add(samples[family.name], sample, _rule(family, sample), worker)
    for name, family in found.items():
        family.samples = list(samples[name].values())
    return list(found.values())


def _rule(family: Metric, sample: Sample) -> Merge:
    if sample.name.endswith("_created"):
        return Merge.MIN
    if family.type in ("counter", "histogram", "summary"):
        return Merge.SUM
    return GAUGES.get(family.name, Merge.MAX)


def _add(samples: dict[_Key, Sample], sample: Sample, rule: Merge, worker: str) -> None:
    labels = sample.labels | {WORKER_LABEL: worker} if rule is Merge.EACH else sample.labels
    key = (sample.name, tuple(sorted(labels.items())))
    value, exemplar = sample.value, sample.exemplar
    if (before := samples.get(key)) is not None:
        value = _joined(rule, before.value, value)
        exemplar = exemplar or before.exemplar
    samples[key] = Sample(sample.name, labels, value, sample.timestamp, exemplar)


def _joined(rule: Merge, one: float, other: float) -> float:
    """Return the value of two processes. A value that one of them does not know (NaN) is that of the other."""
    if math.isnan(one) or math.isnan(other):
        return other if math.isnan(one) else one
    match rule:
        case Merge.SUM:
            return one + other
        case Merge.MIN:
            return min(one, other)
        case _:
            return max(one, other)


def exposition_of(registry: CollectorRegistry) -> str:
    """Return the metrics of a registry in the OpenMetrics format."""
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()
