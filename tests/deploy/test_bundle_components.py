"""Components for bundles from other places: each renders on the base, and changes only its own fields."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.image_check import kube
from tests.deploy.manifests import kubectl
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.programs

COMPONENTS = ("bundle-pvc", "bundle-s3", "bundle-image")
Objects = dict[tuple[str, str], Any]


def rendered(component: str, folder: Path) -> Objects:
    return by_name(kube.rendered_with(Path(kubectl()), component, folder))


def base() -> Objects:
    return by_name(kube.rendered(Path(kubectl()), ROOT / "deploy" / "base"))


def by_name(objects: list[Any]) -> Objects:
    """Return objects by kind and name, without the hash at the end of a ConfigMap's name."""
    named = {}
    for thing in objects:
        name = thing["metadata"]["name"]
        named[thing["kind"], name.rpartition("-")[0] if thing["kind"] == "ConfigMap" else name] = thing
    return named


def pod_of(objects: Objects) -> dict[str, Any]:
    pod: dict[str, Any] = objects["Deployment", "antiphon"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_sets_the_mount_path_of_the_bundle(component: str, tmp_path: Path) -> None:
    objects = rendered(component, tmp_path)
    path = objects["ConfigMap", "antiphon"]["data"]["ANTIPHON_BUNDLE"]
    (server,) = pod_of(objects)["containers"]
    (mount,) = server["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == (path, True)
    (volume,) = pod_of(objects)["volumes"]
    assert volume["name"] == mount["name"]
    settings = server["envFrom"][0]["configMapRef"]["name"]
    assert settings == objects["ConfigMap", "antiphon"]["metadata"]["name"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_changes_nothing_else_of_the_base(component: str, tmp_path: Path) -> None:
    changed, plain = rendered(component, tmp_path), base()
    for objects in (changed, plain):
        objects["ConfigMap", "antiphon"]["data"].pop("ANTIPHON_BUNDLE", None)
        objects["ConfigMap", "antiphon"]["metadata"].pop("name")
        (server,) = pod_of(objects)["containers"]
        server["envFrom"][0]["configMapRef"].pop("name")
        server.pop("volumeMounts", None)
        for kind in ("requests", "limits"):
            server["resources"][kind].pop("ephemeral-storage")
        # The annotations with the reasons for failed checks of checkov.
        objects["Deployment", "antiphon"]["metadata"].pop("annotations")
        pod_of(objects).pop("volumes", None)
        pod_of(objects).pop("initContainers", None)
    assert {key: changed[key] for key in plain} == plain


@pytest.mark.parametrize("component", ["bundle-s3", "bundle-image"])
def test_init_container_has_the_restrictions_of_the_server(component: str, tmp_path: Path) -> None:
    pod = pod_of(rendered(component, tmp_path))
    (server,), (copier,) = pod["containers"], pod["initContainers"]
    assert copier["securityContext"] == server["securityContext"]
    assert copier["resources"]["requests"] == copier["resources"]["limits"]
    (volume,) = pod["volumes"]
    assert volume["emptyDir"]["sizeLimit"] == copier["resources"]["limits"]["ephemeral-storage"]
    assert server["resources"]["limits"]["ephemeral-storage"] == volume["emptyDir"]["sizeLimit"]
    assert [mount["name"] for mount in copier["volumeMounts"]] == [volume["name"]]
    tag = copier["image"].rpartition(":")[2]
    assert tag[0].isdigit(), f"{copier['image']} is not pinned"


def test_s3_component_allows_dns_and_https_and_requires_a_secret(tmp_path: Path) -> None:
    objects = rendered("bundle-s3", tmp_path)
    policy = objects["NetworkPolicy", "antiphon-bundle-s3"]["spec"]
    labels = objects["Deployment", "antiphon"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Egress"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443}
    (copier,) = pod_of(objects)["initContainers"]
    wanted = {entry["valueFrom"]["secretKeyRef"]["key"] for entry in copier["env"] if "valueFrom" in entry}
    assert wanted == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    where = objects["ConfigMap", "antiphon-bundle-s3"]
    assert copier["envFrom"] == [{"configMapRef": {"name": where["metadata"]["name"]}}]
    assert where["data"]["RCLONE_CONFIG_BUNDLE_REMOTE"].startswith("storage:")
    assert copier["args"][-2:] == ["bundle:", copier["volumeMounts"][0]["mountPath"]]


def test_playable_does_not_change_the_pod() -> None:
    objects = list(base().values())
    before = copy.deepcopy(objects)
    played = by_name(list(yaml.safe_load_all(kube.playable(copy.deepcopy(objects)))))
    assert {kind for kind, _ in played} == {"Deployment", "ConfigMap"}
    pod = pod_of(by_name(before))
    pod["containers"][0]["image"] = f"localhost/{pod['containers'][0]['image']}"
    del pod["containers"][0]["ports"]
    pod["restartPolicy"] = "Never"
    assert json.dumps(pod_of(played), sort_keys=True) == json.dumps(pod, sort_keys=True)
