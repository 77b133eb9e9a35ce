"""The Helm chart: its objects are those of the kustomizations, for every release and value."""

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, Manifest, load, of_kind, rendered
from tests.deploy.test_manifests_schema import check
from tests.deploy.tools import tool

pytestmark = pytest.mark.programs

VERSION = importlib.metadata.version("antiphon")
CHART = DEPLOY / "chart"
# Labels and annotations that a chart adds.
OWN = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart", "checksum/settings")
EVERYTHING = {
    "image": {"repository": "registry.example.org/team/antiphon", "tag": "1.2.3", "digest": f"sha256:{'a' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "replicas": 3,
    "settings": {"ANTIPHON_BUNDLE": "/models/ours", "ANTIPHON_THREADS": 4},
    "resources": {"limits": {"memory": "4Gi"}},
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "annotations": {"example.org/team": "words"},
    "nodeSelector": {"kubernetes.io/arch": "arm64"},
    "tolerations": [{"key": "words", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "networkPolicy": True,
    "monitoring": True,
}


def helm(*arguments: str, values: Any = None) -> subprocess.CompletedProcess[str]:
    program = str(tool("helm", "make deploy-tools installs it"))
    given = [] if values is None else ["--values", "-"]
    return subprocess.run(
        [program, *arguments, *given], input=yaml.safe_dump(values), capture_output=True, text=True, check=False
    )


def objects(release: str = "antiphon", values: Any = None, chart: Path = CHART) -> list[Manifest]:
    done = helm("template", release, str(chart), "--namespace", "antiphon", values=values)
    assert done.returncode == 0, done.stderr
    return load(done.stdout)


def comparable(manifest: Any) -> Any:
    """Return an object without what a chart adds, and the hash in the name of Kustomize's ConfigMap."""
    if isinstance(manifest, list):
        return [comparable(item) for item in manifest]
    if not isinstance(manifest, dict):
        return "antiphon" if isinstance(manifest, str) and manifest.startswith("antiphon-") else manifest
    kept = {name: comparable(value) for name, value in manifest.items() if name not in OWN}
    return {name: value for name, value in kept.items() if name != "annotations" or value}


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = {manifest["kind"]: comparable(manifest) for manifest in manifests}
    assert len(found) == len(manifests)
    return found


def test_chart_renders_the_overlay_cpu() -> None:
    overlay = by_kind([manifest for manifest in rendered("cpu") if manifest["kind"] != "Namespace"])
    ours = by_kind(objects())
    assert ours.keys() == overlay.keys()
    for kind, manifest in overlay.items():
        assert ours[kind] == manifest, kind


def test_chart_with_monitoring_renders_that_component() -> None:
    ours = by_kind(objects(values={"monitoring": True}))
    for kind in ("ServiceMonitor", "PrometheusRule"):
        (manifest,) = of_kind(rendered("+monitoring"), kind)
        assert ours[kind]["spec"] == comparable(manifest["spec"]), kind


@pytest.mark.parametrize("release", ["antiphon", "words"])
def test_objects_match_their_schemas_with_every_value(release: str) -> None:
    manifests = objects(release, EVERYTHING)
    (deployment,) = of_kind(manifests, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"registry.example.org/team/antiphon:1.2.3@sha256:{'a' * 64}"
    assert deployment["spec"]["replicas"] == 3
    for name in ("imagePullSecrets", "volumes", "nodeSelector", "tolerations", "affinity"):
        assert pod[name] == EVERYTHING[name], name
    assert container["volumeMounts"] == EVERYTHING["volumeMounts"]
    assert container["resources"]["limits"]["memory"] == "4Gi"
    (settings,) = of_kind(manifests, "ConfigMap")
    assert settings["data"]["ANTIPHON_BUNDLE"] == "/models/ours"
    assert settings["data"]["ANTIPHON_THREADS"] == "4"
    for manifest in manifests:
        check(manifest)


def test_two_releases_in_a_namespace_share_nothing() -> None:
    releases = {name: objects(name, {"monitoring": True}) for name in ("first", "second")}
    names = [{(each["kind"], each["metadata"]["name"]) for each in manifests} for manifests in releases.values()]
    assert not names[0] & names[1]
    for release, manifests in releases.items():
        (deployment,) = of_kind(manifests, "Deployment")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        specs = {manifest["kind"]: manifest["spec"] for manifest in manifests if "spec" in manifest}
        selectors = [specs["Service"]["selector"], specs["NetworkPolicy"]["podSelector"]["matchLabels"]]
        kinds = ("Deployment", "PodDisruptionBudget", "ServiceMonitor")
        selectors += [specs[kind]["selector"]["matchLabels"] for kind in kinds]
        selectors += [
            each["labelSelector"]["matchLabels"]
            for each in deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        ]
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert selector["app.kubernetes.io/instance"] == release
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert container["envFrom"][0]["configMapRef"]["name"] == of_kind(manifests, "ConfigMap")[0]["metadata"]["name"]


def test_a_changed_setting_restarts_the_pods() -> None:
    templates = [
        of_kind(objects(values=values), "Deployment")[0]["spec"]["template"]["metadata"]
        for values in (None, {"settings": {"ANTIPHON_THREADS": "3"}})
    ]
    assert templates[0] != templates[1]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": "many"}, "replicas"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"settings": {"THREADS": 1}}, "THREADS"),
        ({"volumeMounts": [{"name": "models"}]}, "mountPath"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Any, named: str) -> None:
    done = helm("template", "antiphon", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr


def test_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    """The package holds the files of the base, to which the chart has links."""
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert objects(chart=tmp_path / f"antiphon-{VERSION}.tgz") == objects()


def test_chart_has_the_version_of_the_package() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert described["version"] == described["appVersion"] == VERSION


def test_lint_finds_nothing() -> None:
    done = helm("lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout
