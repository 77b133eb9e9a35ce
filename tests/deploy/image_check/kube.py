"""Plays rendered manifests: podman makes a pod of a Deployment, with its ConfigMap, volumes and init containers.

Podman is no cluster: it knows no gRPC probes, no preStop, no topology and no NetworkPolicy; those it leaves out.
"""

from __future__ import annotations

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
    """The objects of a Kustomize directory. Raises CalledProcessError."""
    done = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def rendered_with(kubectl: Path, component: str, folder: Path) -> list[dict[str, Any]]:
    """The base with one component."""
    # kustomize takes only relative paths.
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
    """What podman can play of them: one replica, images of this machine."""
    kept = [thing for thing in objects if thing["kind"] in _PLAYED]
    for thing in kept:
        thing["metadata"].pop("namespace", None)
        if thing["kind"] == "Deployment":
            thing["spec"]["replicas"] = 1
            # A Deployment's pods always restart; podman would then restart init containers that ended well (4.3).
            thing["spec"]["template"]["spec"]["restartPolicy"] = "Never"
            _adapt(thing["spec"]["template"]["spec"])
    return yaml.safe_dump_all(kept)


def _adapt(pod: dict[str, Any]) -> None:
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        if not container["image"].startswith("localhost/"):
            container["image"] = f"localhost/{container['image']}"
        # Podman would publish them on this machine; the pod's own address is asked.
        container.pop("ports", None)


@contextlib.contextmanager
def secret(podman: Podman, name: str, values: Mapping[str, str]) -> Iterator[None]:
    """A Secret for pods, as podman keeps it: the one of a manifest it could not read again (4.3)."""
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
    """The container `antiphon` of a pod, which ends with the context, its volumes too."""
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
    """Of all its containers: the infra container holds the network."""
    infra = json.loads(podman.run("pod", "inspect", POD))["InfraContainerID"]
    return Container(podman, infra).address
