"""Renderings of deploy/ by Kustomize: each shipped overlay, and each component over the base."""

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import ROOT, tool

DEPLOY = ROOT / "deploy"
OVERLAYS = tuple(sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
COMPONENTS = tuple(sorted(path.name for path in (DEPLOY / "components").iterdir()))
# Components that change objects of another component.
PREREQUISITES = {"inference-pool": ("gateway",), "autoscaling": ("monitoring",)}
# Every checked rendering: the overlays, and "+NAME" for a component over the base. The component `kserve` is complete
# only with its overlay, which removes the Deployment.
RENDERINGS = (*OVERLAYS, *(f"+{name}" for name in COMPONENTS if name != "kserve"))
# Manifests that are applied manually, in addition to a component.
BY_HAND = ("components/bundle-pvc/fill.yaml",)

Manifest = dict[str, Any]


def load(text: str) -> list[Manifest]:
    """Return the objects of a YAML stream, read by libyaml, because definitions of custom resources have megabytes."""
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found is not None]


@functools.cache
def kubectl() -> str:
    """Return the program. Skips the test if there is none, or only one with an old Kustomize (Debian 12's)."""
    found = str(tool("kubectl", "make deploy-tools installs it"))
    output = subprocess.run([found, "version", "--client"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"Kustomize Version: v(\d+)", output)
    if version is None or int(version[1]) < 5:
        pytest.skip(f"{found} is older than 1.27, and has no Kustomize 5: make deploy-tools installs one")
    return found


def kustomize(folder: Path) -> str:
    """Return the YAML that `kubectl kustomize FOLDER` prints."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


def combine(components: tuple[str, ...], **more: Any) -> list[Manifest]:
    """Render the base with components, in order. more: further fields of the kustomization."""
    with tempfile.TemporaryDirectory() as folder:
        # Kustomize takes folders outside the current one by relative paths only.
        deploy = Path(os.path.relpath(DEPLOY, Path(folder).resolve()))
        table = {
            "namespace": "antiphon",
            "resources": [str(deploy / "base")],
            "components": [str(deploy / "components" / name) for name in components],
            **more,
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(table), encoding="utf-8")
        return load(kustomize(Path(folder)))


@functools.cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """Return the objects of one of RENDERINGS. Do not change them: all tests share them."""
    if name.startswith("+"):
        component = name.removeprefix("+")
        return tuple(combine((*PREREQUISITES.get(component, ()), component)))
    return tuple(load(kustomize(DEPLOY / "overlays" / name)))


def of_kind(objects: tuple[Manifest, ...] | list[Manifest], kind: str) -> list[Manifest]:
    return [found for found in objects if found["kind"] == kind]


def pods(objects: tuple[Manifest, ...] | list[Manifest]) -> Iterator[tuple[Mapping[str, str], Manifest]]:
    """Return labels and specification of every server's pod: of a Deployment, or of the pod that KServe creates."""
    for deployment in of_kind(objects, "Deployment"):
        template = deployment["spec"]["template"]
        yield template["metadata"]["labels"], template["spec"]
    for service in of_kind(objects, "InferenceService"):
        predictor = service["spec"]["predictor"]
        (runtime,) = [
            found
            for found in of_kind(objects, "ServingRuntime")
            if found["metadata"]["name"] == predictor["model"]["runtime"]
        ]
        name = service["metadata"]["name"]
        containers = yaml.safe_dump(runtime["spec"]["containers"]).replace("{{.Name}}", name)
        labels = {"serving.kserve.io/inferenceservice": name}
        yield labels, {**predictor, "containers": yaml.safe_load(containers)}


def settings(objects: tuple[Manifest, ...] | list[Manifest], container: Manifest) -> dict[str, str]:
    maps = {found["metadata"]["name"]: found["data"] for found in of_kind(objects, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    return found | {variable["name"]: variable["value"] for variable in container.get("env", ())}
