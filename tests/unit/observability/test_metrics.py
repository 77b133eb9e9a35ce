"""Metrics, histograms, and docs/OBSERVABILITY.md, which has exactly one row for every metric."""

import dataclasses
import math
import re
import weakref
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from antiphon.bundle.manifest import MemoryFit
from antiphon.domain.errors import InvalidArgument, QueueFull, SlowReader, Unavailable
from antiphon.domain.request import CancelCause, FinishReason, Timing
from antiphon.observability.engine_metrics import CacheUse, Metrics
from antiphon.observability.families import CountedHistogram
from antiphon.observability.metrics import MERGE_RULES, MetricFamilies, WorkerMetrics, add_process_metrics
from antiphon.observability.telemetry import RpcMetrics
from antiphon.observability.workspace_metrics import KINDS, LENGTHS
from antiphon.ops.workspace import Workspace
from antiphon.rpc.client_waits import WaitMetrics
from antiphon.rpc.reloading import FileMetrics
from antiphon.runtime.runner import EncodeReport
from antiphon.server.settings import ServerConfig
from tests.waits import client_waits

REPORT = EncodeReport(
    rows=3,
    num_tokens=30,
    longest=10,
    peak_workspace_bytes=900,
    predicted_fused_bytes=1000.0,
    predicted_materialised_bytes=4000,
)
TIMING = Timing(queued_s=0.1, first_token_s=0.2, total_s=0.5)


class Scrape:
    """Metrics and the samples of a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.families = MetricFamilies(self.registry)
        self.metrics = Metrics(self.families, "one")

    def __call__(self, name: str, *, model_name: str = "one", **labels: str) -> float | None:
        return self.registry.get_sample_value(f"antiphon_{name}", {"model_name": model_name, **labels})

    def check(self, prefix: str = "", **expected: object) -> None:
        """Check samples by their names."""
        assert {name: self(prefix + name) for name in expected} == expected


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


def test_metrics_count_encoder_and_decoder_tokens_separately(scrape: Scrape) -> None:
    scrape.metrics.encoded(REPORT, 28)
    scrape.metrics.decoded(5, 3, 0.004)
    scrape.check(prompt_tokens_total=28, padding_tokens_total=2, generation_tokens_total=5)
    scrape.check("inter_token_latency_seconds_", count=3, sum=pytest.approx(0.012))
    scrape.check(encode_batch_size_sum=3, decode_batch_size_sum=5)


def test_metrics_contain_workspace_and_its_predictions(scrape: Scrape) -> None:
    scrape.metrics.encoded(dataclasses.replace(REPORT, peak_workspace_bytes=1500), 30)
    scrape.metrics.encoded(REPORT, 30)
    name = "encoder_workspace_"
    scrape.check(name, measured_bytes=900, measured_max_bytes=1500, measured_run_bytes_count=2, residual_bytes=-100)
    scrape.check(name, predicted_fused_bytes=1000, predicted_materialised_bytes=4000)
    quotients = [scrape(f"{name}measured_to_predicted_ratio_bucket", le=le) for le in ("0.75", "0.9", "1.25", "1.5")]
    assert quotients == [0, 1, 1, 2]


def test_metrics_omit_the_workspace_when_it_was_not_measured(scrape: Scrape) -> None:
    unknown = dataclasses.replace(REPORT, peak_workspace_bytes=None, predicted_fused_bytes=None)
    scrape.metrics.encoded(unknown, 30)
    scrape.check("encoder_workspace_", measured_run_bytes_count=0, measured_to_predicted_ratio_count=0)
    scrape.check("encoder_workspace_", predicted_materialised_run_bytes_count=1)


def test_metrics_count_workspace_by_length_of_runs_of_one_source(scrape: Scrape) -> None:
    for length in (32, 33, 64):
        lone = dataclasses.replace(REPORT, rows=1, num_tokens=length, longest=length)
        scrape.metrics.encoded(dataclasses.replace(lone, predicted_materialised_bytes=length**2), length)
    scrape.metrics.encoded(REPORT, 30)  # of three sources, so of no single length
    runs = {length: scrape("encoder_lone_runs_total", source_len=length) for length in LENGTHS}
    assert {length: count for length, count in runs.items() if count} == {"32": 1, "64": 2}
    assert scrape("encoder_lone_tokens_total", source_len="64") == 33 + 64
    kinds = {kind: scrape("encoder_lone_workspace_bytes_total", source_len="64", kind=kind) for kind in KINDS}
    assert kinds == {"measured": 1800, "predicted_fused": 2000, "predicted_materialised": 33**2 + 64**2}


def test_metrics_count_a_length_beyond_every_bound(scrape: Scrape) -> None:
    unknown = dataclasses.replace(REPORT, rows=1, num_tokens=10_000, longest=10_000, peak_workspace_bytes=None)
    scrape.metrics.encoded(unknown, 10_000)
    assert scrape("encoder_lone_runs_total", source_len="+Inf") == 1
    kinds = [scrape("encoder_lone_workspace_bytes_total", source_len="+Inf", kind=kind) for kind in KINDS]
    assert kinds == [0, 1000, 4000]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_metrics_count_every_end_once(scrape: Scrape, reason: FinishReason) -> None:
    scrape.metrics.finished(reason, "running", TIMING)
    counted = {
        "success": scrape("request_success_total", finished_reason=reason.value),
        "cancelled": scrape("cancellations_total", stage="running", cause="client"),
        "late": scrape("deadline_misses_total", stage="running"),
        "failed": scrape("request_errors_total", stage="running"),
    }
    assert [value for value in counted.values() if value] == [1.0]
    is_full = reason not in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)
    assert scrape("e2e_request_latency_seconds_count") == int(is_full)


def test_metrics_split_the_cache_into_self_cross_and_free(scrape: Scrape) -> None:
    scrape.metrics.occupied(4, CacheUse(num_self=6, num_cross=3, num_free=11, block_bytes=100))
    assert scrape("num_requests_running") == 4
    assert scrape("kv_cache_usage_ratio") == pytest.approx(9 / 20)
    assert [scrape("kv_cache_blocks", use=use) for use in ("self", "cross", "free")] == [6, 3, 11]
    assert [scrape("kv_cache_bytes", use=use) for use in ("self", "cross", "free")] == [600, 300, 1100]


def test_metrics_follow_naming_rules(scrape: Scrape) -> None:
    families = list(text_string_to_metric_families(generate_latest(scrape.registry).decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert re.fullmatch(r"antiphon_[a-z][a-z0-9_]*", family.name)
        assert not family.name.endswith("_milliseconds")
        assert family.documentation
        if family.type == "histogram" and family.name.endswith("_seconds"):
            bounds = [float(s.labels["le"]) for s in family.samples if "le" in s.labels]
            assert bounds[0] == 0.001


def test_metrics_have_one_family_with_a_label_for_each_model(scrape: Scrape) -> None:
    other = Metrics(scrape.families, "two")
    scrape.metrics.decoded(5, 3, 0.004)
    other.decoded(2, 0, 0.0)
    other.finished(FinishReason.STOP, "running", TIMING)
    assert [scrape("generation_tokens_total", model_name=name) for name in ("one", "two")] == [5, 2]
    assert [scrape("decode_batch_size_count", model_name=name) for name in ("one", "two")] == [1, 1]
    assert scrape("request_success_total", finished_reason=FinishReason.STOP.value) == 0


def test_metrics_read_the_queue_at_every_scrape(scrape: Scrape) -> None:
    now_s = 0.0
    scrape.metrics.watch_queue(Waiting(), lambda: now_s)
    found = [scrape(name) for name in ("num_requests_waiting", "num_tokens_waiting", "num_requests_preempted")]
    assert found == [2, 5, 1]
    assert math.isnan(scrape("expected_wait_seconds") or 0.0)
    now_s = 4.0
    assert scrape("expected_wait_seconds") == 2.0


def test_metrics_of_a_removed_model_leave_no_sample_and_no_reference(scrape: Scrape) -> None:
    other = Metrics(scrape.families, "two")
    waiting = Waiting()
    reference = weakref.ref(waiting)
    other.watch_queue(waiting, lambda: 0.0)
    other.holds(weights=1, cache=2, workspace=3)
    for report in (other.encoded, scrape.metrics.encoded):
        report(REPORT, 30)
    other.remove()
    del waiting
    assert reference() is None
    other.decoded(1, 1, 0.1)  # an engine can still end its last requests
    other.finished(FinishReason.STOP, "running", TIMING)
    assert {labels["model_name"] for labels in labels_of(scrape.registry) if "model_name" in labels} == {"one"}


class Waiting:
    """Queue with fixed values."""

    num_source_tokens = 5
    num_preempted = 1

    def __len__(self) -> int:
        return 2

    def expected_wait_s(self, now_s: float) -> float | None:
        return 0.5 * now_s if now_s else None


def labels_of(registry: CollectorRegistry) -> list[dict[str, str]]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [sample.labels for family in families for sample in family.samples]


def test_metrics_contain_memory_of_models_and_the_budget_when_it_is_set(scrape: Scrape) -> None:
    scrape.metrics.holds(weights=100, cache=20, workspace=3)
    assert [scrape("model_memory_bytes", kind=kind) for kind in ("weights", "cache", "workspace")] == [100, 20, 3]
    assert scrape.registry.get_sample_value("antiphon_memory_budget_bytes") is None
    scrape.families.set_budget(1 << 30)
    assert scrape.registry.get_sample_value("antiphon_memory_budget_bytes") == 1 << 30


def test_counters_are_zero_under_every_label_before_their_first_event(scrape: Scrape) -> None:
    before = labels_of(scrape.registry)
    for reason, stage, cause in product(FinishReason, ("waiting", "encoding", "running"), CancelCause):
        if (reason, cause) != (FinishReason.CANCELLED, CancelCause.DEADLINE):  # counts as a deadline miss
            scrape.metrics.finished(reason, stage, TIMING, cause=cause)
    for cause in CancelCause:
        scrape.metrics.left_unread(cause)
    for kind in (InvalidArgument, QueueFull, SlowReader, Unavailable):
        scrape.metrics.refused(kind.reason)
    scrape.metrics.deadline_missed("submit")
    assert labels_of(scrape.registry) == before


def test_metrics_contain_the_configuration_of_a_model_and_the_fit_of_its_predictions(scrape: Scrape) -> None:
    scrape.metrics.is_served(precision="int8", lowering="native", architecture="encoder")
    fit = MemoryFit(a=7.0, b=5.0, c=3.0, residual=0.02, exponent=2.0, max_len=64, max_rows=8)
    scrape.metrics.predicts_by(fit)
    assert scrape("model_info", precision="int8", lowering="native", architecture="encoder") == 1
    assert [scrape("encoder_workspace_fit_coefficient", term=term) for term in "abc"] == [7, 5, 3]
    assert scrape("encoder_workspace_fit_residual_ratio") == 0.02


def test_arena_metrics_contain_the_counts_of_an_allocator_and_its_highest_peak(scrape: Scrape) -> None:
    workspace = Workspace(is_own=True)
    scrape.metrics.watch_arena(workspace)
    workspace.limit_growth(1 << 20)
    stats = workspace.stats()
    for field in ("in_use_bytes", "reserved_bytes", "cached_bytes", "limit_bytes"):
        assert scrape(f"arena_{field}") == getattr(stats, field)
    assert scrape("arena_peak_bytes") == stats.highest_bytes
    assert scrape("arena_refusals_total") == 0
    scrape.metrics.remove()
    reference = weakref.ref(workspace)
    del workspace
    assert reference() is None


def test_scrape_without_rpcs_in_flight_has_counted_every_rpc_that_ended(scrape: Scrape) -> None:
    rpcs = RpcMetrics(scrape.families)
    rpcs.expect("Generate")
    for num_before in range(len(list(scrape.registry.collect()))):
        rpcs.begun()
        read: dict[str, float] = {}
        for place, family in enumerate(scrape.registry.collect()):
            read |= {sample.name + str(sample.labels): sample.value for sample in family.samples}
            if place == num_before:
                rpcs.handled("Generate", "OK")
                rpcs.left()
        num_handled = read["antiphon_grpc_server_handled_total" + str({"method": "Generate", "code": "OK"})]
        assert read["antiphon_grpc_server_in_flight{}"] == 1 or num_handled == num_before + 1


def test_latency_exemplars_have_the_trace_id_in_the_bucket_of_their_value(scrape: Scrape) -> None:
    scrape.metrics.first_token(0.0015, "ab" * 16)
    scrape.metrics.first_token(0.0016)
    scrape.metrics.finished(FinishReason.STOP, "running", TIMING, trace_id="cd" * 16)
    render, parse = cast(Any, openmetrics.generate_latest), cast(Any, openmetrics_families)
    found = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in parse(render(scrape.registry).decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert {key: (exemplar.labels, exemplar.value) for key, exemplar in found.items()} == {
        ("antiphon_time_to_first_token_seconds_bucket", "0.002"): ({"trace_id": "ab" * 16}, 0.0015),
        ("antiphon_e2e_request_latency_seconds_bucket", "0.5"): ({"trace_id": "cd" * 16}, 0.5),
    }


BOUNDS = (0.001, 0.01, 0.5, 2.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.5, 1.0, 2.0, 9.0]),
            st.integers(1, 5),
            st.sampled_from(["one", "two"]),
        ),
        max_size=30,
    )
)
def test_counted_histogram_is_exported_like_prometheus_clients(
    observations: list[tuple[float, int, str]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=BOUNDS, registry=ours)
    plain = Histogram("gap_seconds", "Gaps.", ["model"], buckets=BOUNDS, registry=theirs)
    children = {name: (counted.labels(name), plain.labels(name)) for name in ("one", "two")}
    for value, count, name in observations:
        counted_child, plain_child = children[name]
        counted_child.observe(value, count)
        for _ in range(count):
            plain_child.observe(value)
    ours_lines, theirs_lines = (generate_latest(registry).decode().splitlines() for registry in (ours, theirs))
    kept = [line for line in theirs_lines if "_created" not in line]
    assert [line for line in ours_lines if "_sum" not in line] == [line for line in kept if "_sum" not in line]
    for name in children:
        expected = theirs.get_sample_value("gap_seconds_sum", {"model": name})
        assert ours.get_sample_value("gap_seconds_sum", {"model": name}) == pytest.approx(expected)


def test_counted_histogram_forgets_the_observations_of_a_removed_label() -> None:
    registry = CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=BOUNDS, registry=registry)
    for name in ("one", "two"):
        counted.labels(name).observe(0.1)
    counted.remove_by_labels({"model": "one"})
    assert registry.get_sample_value("gap_seconds_count", {"model": "one"}) is None
    assert registry.get_sample_value("gap_seconds_count", {"model": "two"}) == 1


def test_counted_histogram_refuses_buckets_that_do_not_increase() -> None:
    with pytest.raises(ValueError, match="gap_seconds"):
        CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=(1.0, 1.0), registry=CollectorRegistry())


DOCS = Path(__file__).parents[3] / "docs" / "OBSERVABILITY.md"
SUFFIXES = {"counter": ("_total",), "info": ("_info",)}


def full_registry() -> CollectorRegistry:
    """Return a registry with every family of a server and a child of each."""
    registry = CollectorRegistry()
    families = MetricFamilies(registry)
    add_process_metrics(registry)
    metrics = Metrics(families, "m")
    metrics.watch_arena(Workspace(is_own=True))
    metrics.is_served(precision="int8", lowering="native", architecture="encoder")
    metrics.holds(weights=1)
    metrics.predicts_by(MemoryFit(a=1.0, b=1.0, c=1.0, residual=0.0, exponent=2.0, max_len=1, max_rows=1))
    families.set_budget(1)
    families.set_machine(1)
    families.watch_loop(lambda: 0.0)
    families.watch_connections(lambda: False)
    families.certificate_expiry()
    FileMetrics(families)
    RpcMetrics(families).expect("a.B/C")
    WaitMetrics(families).watch(client_waits())
    WorkerMetrics(registry, 2, lambda: 2)
    return registry


def rows(registry: CollectorRegistry) -> dict[str, tuple[str, str, str]]:
    """Return type, labels and help text of each family, by its name in queries."""
    found = {}
    for family in registry.collect():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + SUFFIXES.get(family.type, ("",))[0]
        found[name] = (family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)
    return found


def documented() -> dict[str, tuple[str, str, str, str]]:
    """Return the rows of the documentation's table: type, labels, help text and use."""
    pattern = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.M)
    return {
        match[1]: (match[2], match[3].strip(), match[4].strip(), match[5].strip())
        for match in pattern.finditer(DOCS.read_text(encoding="utf-8"))
    }


def test_documented_metrics_equal_those_of_the_registry() -> None:
    ours = {name: row for name, row in rows(full_registry()).items() if name.startswith("antiphon_")}
    assert {name: row[:3] for name, row in documented().items()} == ours
    assert [name for name, row in documented().items() if len(row[3]) < 10] == []


def test_every_gauge_of_ours_has_a_rule_that_merges_those_of_several_processes() -> None:
    gauges = {name for name, row in rows(full_registry()).items() if row[0] in ("gauge", "info")}
    assert {name for name in gauges - MERGE_RULES.keys() if name.startswith(("antiphon_", "process_"))} == set()


def test_settings_of_logs_and_spans_are_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in ("log_level", "log_format", "access_log", "otlp_endpoint", "trace_sample_ratio", "metrics_port"):
        assert name in ServerConfig.model_fields
        assert f"`{name}`" in text


def test_queries_of_the_documentation_name_metrics_that_exist() -> None:
    known = {*rows(full_registry())}
    queries = re.findall(r"```promql\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    named = set(re.findall(r"\b(?:antiphon|process)_\w+", "".join(queries)))
    assert len(named) > 10
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_names_follow_the_rules_of_promtool() -> None:
    for family in full_registry().collect():
        _check_name(family)


def _check_name(family: Metric) -> None:
    name = family.name
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert family.documentation, name
    assert not re.search(r"_(milliseconds|ms|kilobytes|megabytes|minutes|percent)(_|$)", name)
    assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert not re.search(rf"_{family.type}(_|$)", name) or family.type == "info"
    for sample in family.samples:
        is_count = sample.name.endswith(("_total", "_created"))
        assert is_count == (family.type == "counter"), sample.name
        assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels), sample
    if family.type == "histogram" and name.startswith("antiphon_"):
        assert name.endswith(("_seconds", "_bytes", "_ratio", "_batch_size")), name
