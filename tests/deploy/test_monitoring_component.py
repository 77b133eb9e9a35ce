"""The objects of the monitoring component select the server of the base, in every overlay with both."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.dashboard import FILE
from tests.deploy.manifests import kustomize
from tests.deploy.tools import ROOT
from tests.marks import programs

pytestmark = programs

OVERLAYS = ("monitoring", "production")
# A Namespace has no namespace.
WITHOUT_NAMESPACE = {"Namespace", "ClusterServingRuntime"}


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load_all(kustomize(ROOT / "deploy" / "overlays" / overlay)))


def one(overlay: str, kind: str, name: str = "antiphon") -> dict[str, Any]:
    (found,) = (it for it in rendered(overlay) if it["kind"] == kind and it["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize("overlay", sorted(path.name for path in (ROOT / "deploy" / "overlays").iterdir()))
def test_objects_are_in_one_namespace(overlay: str) -> None:
    found = {it["kind"]: it["metadata"].get("namespace") for it in rendered(overlay)}
    assert {kind: name for kind, name in found.items() if kind not in WITHOUT_NAMESPACE and name != "antiphon"} == {}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_service_monitor_selects_the_service_and_names_the_job_antiphon(overlay: str) -> None:
    monitor, service = one(overlay, "ServiceMonitor")["spec"], one(overlay, "Service")
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "antiphon"
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_config_map_has_the_dashboard_and_the_label_of_the_sidecar(overlay: str) -> None:
    held = one(overlay, "ConfigMap", "antiphon-dashboard")
    assert held["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert held["data"] == {FILE.name: FILE.read_text(encoding="utf-8")}
