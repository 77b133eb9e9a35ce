"""docs/OBSERVABILITY.md has exactly one row for every metric, with the same help text."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from antiphon.bundle.manifest import MemoryFit
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MERGE_RULES, MetricFamilies, WorkerMetrics, add_process_metrics
from antiphon.observability.telemetry import RpcMetrics
from antiphon.ops.workspace import Workspace
from antiphon.rpc.client_waits import WaitMetrics
from antiphon.rpc.reloading import FileMetrics
from antiphon.server.settings import ServerConfig
from tests.waits import client_waits

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
