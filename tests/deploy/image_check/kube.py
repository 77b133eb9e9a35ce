"""Runs rendered manifests: podman creates a pod from a Deployment, with its ConfigMap, volumes and init containers.

Podman is not a cluster: it ignores gRPC probes, preStop, topology and NetworkPolicy.
"""

import base64
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.image_check.podman import Container, Podman
from tests.deploy.tools import ROOT

POD = "antiphon-pod-0"
_PLAYED = ("Deployment", "ConfigMap", "Secret", "PersistentVolumeClaim")


def rendered(kubectl: Path, overlay: Path) -> list[dict[str, Any]]:
    """Return the objects of a Kustomize directory. Raises CalledProcessError."""
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def rendered_with(kubectl: Path, component: str, folder: Path) -> list[dict[str, Any]]:
    """Return the base with one component."""
    # kustomize accepts only relative paths.
    base, added = (os.path.relpath(ROOT / "deploy" / name, folder) for name in ("base", f"components/{component}"))
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
        "components": [added],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return rendered(kubectl, folder)


def playable(objects: list[dict[str, Any]]) -> str:
    """Return the objects that podman can run: one replica, images of this machine."""
    kept = [thing for thing in objects if thing["kind"] in _PLAYED]
    for thing in kept:
        thing["metadata"].pop("namespace", None)
        if thing["kind"] == "Deployment":
            thing["spec"]["replicas"] = 1
            # A Deployment's pods always restart. With that setting, podman restarts successful init containers (4.3).
            thing["spec"]["template"]["spec"]["restartPolicy"] = "Never"
            _adapt(thing["spec"]["template"]["spec"])
    return yaml.safe_dump_all(kept)


def _adapt(pod: dict[str, Any]) -> None:
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        if not container["image"].startswith("localhost/"):
            container["image"] = f"localhost/{container['image']}"
        # Podman would publish the ports on this machine; the tests use the pod's address.
        container.pop("ports", None)


@contextlib.contextmanager
def secret(podman: Podman, name: str, values: Mapping[str, str]) -> Iterator[None]:
    """Create a Secret for pods with podman, which cannot read the one of a manifest (4.3)."""
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump({key: base64.b64encode(value.encode()).decode() for key, value in values.items()}, file)
        file.flush()
        podman.run("secret", "create", name, file.name)
    try:
        yield
    finally:
        podman.run("secret", "rm", name)


@contextlib.contextmanager
def playing(podman: Podman, manifest: str, folder: Path) -> Iterator[Container]:
    """Run a pod and yield its container `antiphon`. The end of the context removes the pod and its volumes."""
    path = folder / "played.yaml"
    path.write_text(manifest)
    try:
        podman.run("kube", "play", "--network=bridge", str(path))
        yield Container(podman, f"{POD}-antiphon")
    finally:
        podman.attempt("pod", "rm", "--force", "--time=60", POD)
        podman.attempt("kube", "down", str(path))
        for thing in yaml.safe_load_all(manifest):
            if thing["kind"] == "Deployment":
                for volume in thing["spec"]["template"]["spec"].get("volumes", ()):
                    if "emptyDir" in volume:  # podman keeps it as a volume of that name
                        podman.attempt("volume", "rm", volume["name"])


def pod_address(podman: Podman) -> str:
    infra = json.loads(podman.run("pod", "inspect", POD))["InfraContainerID"]
    return Container(podman, infra).address
