"""The shipped rules: valid, tested by promtool, and consistent with metrics, runbook and PrometheusRule."""

import re
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.certificates import Authority
from tests.deploy.faults import FAULTS
from tests.deploy.scaling import ALERTS, RULES, alert_names, alerts, read_yaml, scaled, scaled_rules
from tests.deploy.schemas import validate
from tests.deploy.tools import ROOT, tool
from tests.deploy.watching import ALERTMANAGER, PROMETHEUS
from tests.integration.process import ServerProcess

pytestmark = pytest.mark.programs

HERE = Path(__file__).parent
FILES = sorted(RULES.glob("*.yaml"))
UNIT_TESTS = sorted((HERE / "rules").glob("*.yaml"))
OBJECT = ROOT / "deploy" / "components" / "monitoring" / "prometheusrule.yaml"
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"
# Labels that Prometheus and Prometheus Operator add to every series of a target.
OF_TARGETS = {"job", "instance", "namespace", "pod"}
_RECORDED = re.compile(r"\b(?:job|instance|antiphon):[\w:]+")
_METRIC = re.compile(r"\b(?:antiphon|process)_\w+\b(?!:)|\bup\b")
_SELECTOR = re.compile(r"((?:antiphon|process)_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|=|!~|!=)\s*"([^"]*)"')


def rules() -> list[dict[str, Any]]:
    return [rule for file in FILES for group in read_yaml(file)["groups"] for rule in group["rules"]]


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_pass_the_checks_of_promtool() -> None:
    run(tool("promtool", PROMETHEUS), "check", "rules", "--lint=all", "--lint-fatal", *FILES)


def test_alertmanager_accepts_its_configuration() -> None:
    run(tool("amtool", ALERTMANAGER), "check-config", ALERTS / "alertmanager.yaml")


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_rules_pass_their_unit_tests(file: Path) -> None:
    run(tool("promtool", PROMETHEUS), "test", "rules", file)


def test_every_alert_has_a_unit_test_and_a_reproducible_fault() -> None:
    tested = [test["name"] for file in UNIT_TESTS for test in read_yaml(file)["tests"]]
    assert sorted(tested) == sorted(alert_names())
    assert {name for fault in FAULTS for name in fault.alerts} == alert_names()


def test_every_unit_test_checks_pending_firing_end_and_an_unaffected_target() -> None:
    for file in UNIT_TESTS:
        for test in read_yaml(file)["tests"]:
            states = [str(check["exp_samples"]) for check in test["promql_expr_test"]]
            assert any("firing" in state for state in states), test["name"]
            assert "[]" in states, test["name"]
            rule = next(rule for rule in alerts() if rule["alert"] == test["name"])
            assert ("for" in rule) == any("pending" in state for state in states), test["name"]


def test_prometheus_rule_equals_the_rules() -> None:
    made = subprocess.run([sys.executable, ALERTS / "prometheusrule.py"], capture_output=True, text=True, check=True)
    assert OBJECT.read_text(encoding="utf-8") == made.stdout
    groups = [group for file in FILES for group in read_yaml(file)["groups"]]
    assert read_yaml(OBJECT)["spec"]["groups"] == groups


def test_prometheus_rule_matches_its_schema() -> None:
    validate(read_yaml(OBJECT))


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_alert_has_a_severity_a_description_and_a_runbook(rule: Mapping[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/RUNBOOK.md#{rule['alert'].lower()}"


def test_runbook_has_the_same_sections_for_every_alert() -> None:
    _, *sections = re.split(r"^### ", RUNBOOK.read_text(encoding="utf-8"), flags=re.M)
    named = {section.partition("\n")[0]: section for section in sections}
    assert set(named) == alert_names()
    for name, section in named.items():
        parts = re.findall(r"^- \*\*(.+?)\.\*\*", section, flags=re.M)
        assert parts == ["Meaning", "Check", "Causes", "Remedy", "Resolved"], name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Return every sample of a real server with all features on: its labels and their values."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    pair = authority.server()
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    with (
        ServerProcess(SHIPPED_BUNDLE, ["--workers=2", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}"]) as server,
        urllib.request.urlopen(server.metrics_url) as response,
    ):
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
            found[sample.name].setdefault("job", set())
    return found


def test_rules_use_only_metrics_that_the_server_exports(
    exported: Mapping[str, Mapping[str, set[str]]],
) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert set(_RECORDED.findall(rule["expr"])) <= recorded, rule
        expression = _RECORDED.sub("", rule["expr"])
        bare = re.sub(r'"[^"]*"', '""', expression)
        missing = {*_METRIC.findall(bare)} - {*exported, "up"}
        assert not missing, rule
        for name, matchers in _SELECTOR.findall(expression):
            for label, operator, value in _MATCHER.findall(matchers):
                assert operator in ("=", "=~")
                wanted = set(value.split("|")) if operator == "=~" else {value}
                missing = wanted - exported[name].get(label, set())
                assert label == "job" or not missing, (name, label, sorted(exported[name]))


def test_labels_of_messages_and_groups_exist(exported: Mapping[str, Mapping[str, set[str]]]) -> None:
    known = OF_TARGETS.union(*(set(labels) for labels in exported.values()))
    for rule in rules():
        used = [*re.findall(r"\$labels\.(\w+)", str(rule)), *_grouped(rule["expr"])]
        assert set(used) <= known, rule


def _grouped(expression: str) -> Iterable[str]:
    for labels in re.findall(r"\b(?:by|without|ignoring|on) \(([^)]*)\)", expression):
        yield from labels.split(", ")


def test_scaled_rules_differ_from_the_shipped_ones_only_in_durations() -> None:
    assert [scaled(duration, 60) for duration in ("30s", "5m", "6h")] == ["500ms", "5000ms", "360000ms"]
    faster = [rule for group in scaled_rules(60)["groups"] for rule in group["rules"]]
    for one, other in zip(rules(), faster, strict=True):
        assert re.sub(r"\[\w+\]", "[]", one["expr"]) == re.sub(r"\[\w+\]", "[]", other["expr"])
        assert {**one, "expr": "", "for": ""} == {**other, "expr": "", "for": ""}
