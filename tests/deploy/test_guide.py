"""docs/DEPLOY.md: the folder that the guide describes, with the component of `antiphon size`, renders."""

from __future__ import annotations

import os
import re

import pytest
import yaml

from antiphon.cli.main import main
from tests.deploy.manifests import DEPLOY, Manifest, kustomize, load, of_kind, pods, settings
from tests.marks import programs

pytestmark = programs

GUIDE = DEPLOY.parent / "docs" / "DEPLOY.md"
BLOCK = re.compile(r"```yaml\n(.*?)```", re.S)


def kustomization() -> dict[str, list[str]]:
    """Return the kustomization of the guide, with the components that its later steps add."""
    blocks = [yaml.safe_load(text) for text in BLOCK.findall(GUIDE.read_text(encoding="utf-8"))]
    (first,) = [block for block in blocks if isinstance(block, dict) and block["kind"] == "Kustomization"]
    first["components"] += [line for block in blocks if isinstance(block, list) for line in block]
    assert isinstance(first, dict)
    return first


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """Return all objects that the guide deploys, with this checkout in place of `../antiphon`."""
    folder = tmp_path_factory.mktemp("opus").resolve()
    (folder / "size").mkdir()
    sizing = ("size", "--rate", "100", "--requests-per-s", "200", "--cores", "4")
    assert main([*sizing, "--kustomize", str(folder / "size" / "kustomization.yaml")]) == 0
    text = yaml.safe_dump(kustomization()).replace("../antiphon/deploy", os.path.relpath(DEPLOY, folder))
    (folder / "kustomization.yaml").write_text(text, encoding="utf-8")
    return load(kustomize(folder))


def test_images_of_the_guide_are_the_pushed_ones(objects: list[Manifest]) -> None:
    ((_, pod),) = pods(objects)
    assert [container["image"] for container in (*pod["initContainers"], *pod["containers"])] == [
        "registry.example.org/opus:1", "registry.example.org/antiphon:0.1.0",
    ]  # fmt: skip


def test_every_component_of_the_guide_takes_effect(objects: list[Manifest]) -> None:
    """Size, bundle and certificates apply to one container; later steps do not undo earlier ones."""
    ((_, pod),) = pods(objects)
    (container,) = pod["containers"]
    has = settings(objects, container)
    assert container["resources"]["limits"]["cpu"] == "4"
    assert int(has["ANTIPHON_THREADS"]) * int(has["ANTIPHON_WORKERS"]) == 4
    assert has["ANTIPHON_BUNDLE"] == "/bundle"
    assert has["ANTIPHON_MAX_QUEUE_TIME_S"] == "10"
    assert has["ANTIPHON_TLS_CLIENT_CA"].startswith("/etc/antiphon/tls/")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/bundle", "/etc/antiphon/tls"}


def test_deployment_of_the_guide_is_monitored_and_scaled(objects: list[Manifest]) -> None:
    (deployment,) = of_kind(objects, "Deployment")
    assert "replicas" not in deployment["spec"]
    for kind in ("ServiceMonitor", "PrometheusRule", "ScaledObject"):
        assert len(of_kind(objects, kind)) == 1
