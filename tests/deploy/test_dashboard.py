"""The dashboard equals its program's output, describes its panels, and omits no metric without a reason."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dashboards.dashboard import rendered
from tests.deploy.dashboard import FILE, committed, expressions, panels
from tests.deploy.scraping import PACKAGE
from tests.deploy.tools import ROOT, tool
from tests.unit.observability.test_metrics import documented

pytestmark = pytest.mark.programs

RULES = ROOT / "deploy" / "alerts" / "rules"
# Metrics that are neither on the dashboard nor in a rule, with the reasons.
ABSENT = {
    **dict.fromkeys(
        (
            "antiphon_encoder_workspace_measured_bytes",
            "antiphon_encoder_workspace_predicted_fused_bytes",
            "antiphon_encoder_workspace_predicted_materialised_bytes",
            "antiphon_encoder_workspace_residual_bytes",
        ),
        "of the last run alone, whichever that was; the dashboard has what counts every run",
    ),
    "antiphon_encoder_workspace_fit_coefficient": "a constant of the bundle; its predictions are shown",
    "antiphon_encoder_workspace_fit_residual_ratio": "a constant of the bundle; what holds now is shown",
    "antiphon_spans_exported_total": "those that are lost are shown",
    "antiphon_worker_restarts_total": "changes of process_start_time_seconds are in the rules",
}


def test_dashboard_equals_the_output_of_its_program() -> None:
    assert FILE.read_text(encoding="utf-8") == rendered(), "run python -m deploy.dashboards"


def test_dashboard_fits_into_an_applied_config_map() -> None:
    # kubectl apply stores the object in an annotation; annotations are limited to 256 KiB.
    assert len(json.dumps(FILE.read_text(encoding="utf-8"))) < 250_000


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_have_a_description_and_a_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 30
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in committed()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in committed()["panels"]}) == len(committed()["panels"])


def test_links_lead_to_existing_alerts() -> None:
    rules = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in RULES.glob("*.yaml")]
    alerts = {
        rule["alert"].lower()
        for file in rules
        for group in file["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    linked = {link["url"].partition("#")[2] for panel in panels() for link in panel.get("links", ())}
    assert linked
    assert linked <= alerts


def test_every_metric_is_on_the_dashboard_or_in_a_rule_or_listed_with_a_reason() -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in RULES.glob("*.yaml"))
    used = set(re.findall(r"\bantiphon_\w+", rules + "".join(one.text for one in expressions())))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert set(documented()) - shown == set(ABSENT)


def test_failures_on_the_dashboard_equal_those_of_the_rules() -> None:
    rules = (RULES / "recording.yaml").read_text(encoding="utf-8")
    (failed,) = (one.text for one in expressions() if one.place.startswith("Failed"))
    reasons = set(re.findall(r'reason=~"([^"]*)"', failed))
    assert len(reasons) == 1
    assert reasons <= set(re.findall(r'reason=~"([^"]*)"', rules))


def test_expressions_are_valid(tmp_path: Path) -> None:
    rules = [{"record": f"panel:number_{index}", "expr": one.text} for index, one in enumerate(expressions())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    checked = subprocess.run(
        [tool("promtool", PACKAGE), "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
