"""Every overlay and component renders, and an API server would accept all objects."""

import copy
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy import schemas
from tests.deploy.manifests import BY_HAND, COMPONENTS, DEPLOY, OVERLAYS, RENDERINGS, Manifest, load, rendered
from tests.deploy.tools import tool

pytestmark = pytest.mark.programs

KUBERNETES = "1.33"


def is_custom(manifest: Manifest) -> bool:
    """Return whether a kind is a custom resource. Groups of Kubernetes have no dot, or end with k8s.io."""
    group = manifest["apiVersion"].rpartition("/")[0]
    own = {"networking.k8s.io", "rbac.authorization.k8s.io"}
    return "." in group and group not in own


def check(manifest: Manifest) -> None:
    """Raise if a manifest does not match the schema of Kubernetes or of its custom resource."""
    if is_custom(manifest):
        schemas.validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", RENDERINGS)
def test_manifests_match_their_schemas(name: str) -> None:
    objects = rendered(name)
    assert objects
    for manifest in objects:
        check(manifest)


@pytest.mark.parametrize("name", BY_HAND)
def test_manually_applied_manifests_match_their_schemas(name: str) -> None:
    for manifest in load((DEPLOY / name).read_text(encoding="utf-8")):
        check(manifest)


@pytest.mark.parametrize("name", RENDERINGS)
def test_manifests_are_unique_objects_of_the_namespace(name: str) -> None:
    """Two objects of one kind and name would overwrite each other; one in another namespace would remain."""
    found = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered(name)]
    assert len(found) == len(set(found))
    for manifest in rendered(name):
        expected = None if manifest["kind"] == "Namespace" else "antiphon"
        assert manifest["metadata"].get("namespace") == expected, manifest


def _misspelt(manifest: Manifest) -> Manifest:
    """Return a copy with an unknown field in its spec."""
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["replicsa"] = 2
    return wrong


def test_misspelt_field_is_refused_for_every_kind() -> None:
    """Otherwise the tests above would always pass."""
    manifests = {found["kind"]: found for name in RENDERINGS for found in rendered(name) if "spec" in found}
    assert {"Deployment", "ScaledObject", "GRPCRoute", "ServingRuntime"} <= manifests.keys()
    for manifest in manifests.values():
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError), match="replicsa"):
            check(_misspelt(manifest))


def test_wrong_type_inside_a_list_is_refused() -> None:
    (scaled,) = [found for found in rendered("autoscaling") if found["kind"] == "ScaledObject"]
    wrong = copy.deepcopy(scaled)
    wrong["spec"]["triggers"][0]["metadata"]["threshold"] = 5
    with pytest.raises(jsonschema.ValidationError, match="is not of type 'string'"):
        check(wrong)


def test_readme_lists_every_overlay_and_component() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`((?:overlays|components)/[a-z0-9-]+)/?`", text))
    folders = {f"overlays/{name}" for name in OVERLAYS} | {f"components/{name}" for name in COMPONENTS}
    assert listed == folders
    for name in folders:
        assert (DEPLOY / name / "kustomization.yaml").is_file()


def test_checkov_reports_only_explained_findings(tmp_path: Path) -> None:
    """Run checkov's checks of Kubernetes over all renderings at once, because it takes seconds to start.

    A copy of the Deployment that may gain privileges goes with them, and must be found.
    """
    checkov = tool("checkov", "make deploy-tools")
    for name in RENDERINGS:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(rendered(name)), encoding="utf-8")
    for name in BY_HAND:
        (tmp_path / Path(name).name).write_bytes((DEPLOY / name).read_bytes())
    (bad,) = [copy.deepcopy(found) for found in rendered("cpu") if found["kind"] == "Deployment"]
    bad["metadata"]["name"] = "privileged"
    bad["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad), encoding="utf-8")

    command = [checkov, "--directory", tmp_path, "--framework", "kubernetes", "--skip-download", "--output", "json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    results = json.loads(done.stdout)["results"]
    failed = {(found["check_id"], found["resource"]) for found in results["failed_checks"]}
    assert failed == {("CKV_K8S_20", "Deployment.antiphon.privileged")}
    checked = {Path(found["file_path"]).stem for found in results["passed_checks"]}
    assert checked >= {name for name in RENDERINGS if any(m["kind"] == "Deployment" for m in rendered(name))}
    for found in results["skipped_checks"]:
        assert len(found["check_result"]["suppress_comment"]) > 20, found
