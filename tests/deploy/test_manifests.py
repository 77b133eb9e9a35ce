"""Properties of the manifests that schemas cannot check: their parts match each other, the server and the guide."""

import os
import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml

from antiphon.cli.main import main
from tests.deploy.dashboard import FILE
from tests.deploy.manifests import (
    DEPLOY,
    PREREQUISITES,
    RENDERINGS,
    Manifest,
    combine,
    kustomize,
    load,
    of_kind,
    pods,
    rendered,
    settings,
)
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.programs

# Clients can read complete answers for 5 s after the grace (docs/RELIABILITY.md), and then the process closes.
CLOSING_S = 15
DEPLOYMENTS = tuple(name for name in RENDERINGS if name != "kserve")


def containers(name: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Return every server's pod, and the server's container in it."""
    found = list(pods(rendered(name)))
    assert found
    for _, pod in found:
        (container,) = pod["containers"]
        yield pod, container


@pytest.mark.parametrize("name", RENDERINGS)
def test_probes_use_a_plaintext_port(name: str) -> None:
    """Kubernetes' probes cannot use TLS: they use probe_port if it is set. Liveness differs from readiness."""
    for _, container in containers(name):
        chosen = settings(rendered(name), container)
        default = next(port["containerPort"] for port in container["ports"] if port["name"] in ("grpc", "h2c"))
        port = int(chosen.get("ANTIPHON_PROBE_PORT", chosen.get("ANTIPHON_PORT", default)))
        assert ("ANTIPHON_TLS_CERT" in chosen) == ("ANTIPHON_PROBE_PORT" in chosen)
        assert port in {found["containerPort"] for found in container["ports"]}
        asked = {kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")}
        assert asked == {
            "startup": {"port": port},
            "readiness": {"port": port},
            "liveness": {"port": port, "service": "liveness"},
        }


@pytest.mark.parametrize("name", RENDERINGS)
def test_grace_period_covers_the_drain(name: str) -> None:
    for pod, container in containers(name):
        chosen = settings(rendered(name), container)
        hook_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        delay_s, grace_s = (float(chosen[f"ANTIPHON_DRAIN_{part}_S"]) for part in ("DELAY", "GRACE"))
        assert pod["terminationGracePeriodSeconds"] >= hook_s + delay_s + grace_s + CLOSING_S


@pytest.mark.parametrize("name", RENDERINGS)
def test_ports_of_containers_equal_those_of_the_settings(name: str) -> None:
    """Every port setting has a container port, and every container port has a setting."""
    defaults = {"ANTIPHON_PORT": "50051", "ANTIPHON_METRICS_PORT": "9090"}
    for _, container in containers(name):
        chosen = defaults | settings(rendered(name), container)
        listening = {int(value) for setting, value in chosen.items() if setting.endswith("PORT")}
        assert listening == {found["containerPort"] for found in container["ports"]}


def _selectors(manifest: Manifest) -> Iterator[dict[str, str]]:
    """Return the labels by which an object selects the server's pods."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "Service":
            yield spec["selector"]
        case "PodDisruptionBudget" | "InferencePool":
            yield spec["selector"]["matchLabels"]
        case "NetworkPolicy":
            yield spec["podSelector"]["matchLabels"]
        case "Deployment":
            yield spec["selector"]["matchLabels"]
            for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
                yield constraint["labelSelector"]["matchLabels"]


@pytest.mark.parametrize("name", RENDERINGS)
def test_selectors_find_the_pods(name: str) -> None:
    ((labels, _),) = pods(rendered(name))
    found = [selector for manifest in rendered(name) if "spec" in manifest for selector in _selectors(manifest)]
    assert found
    for selector in found:
        assert selector
        assert selector.items() <= labels.items()


def _named_ports(manifest: Manifest) -> set[str | int]:
    """Return the pods' ports that an object uses, by name or number."""
    spec = manifest["spec"]
    if manifest["kind"] == "Service":
        return {port["targetPort"] for port in spec["ports"]}
    if manifest["kind"] == "InferencePool":
        return {port["number"] for port in spec["targetPorts"]}
    if manifest["kind"] == "NetworkPolicy":
        return {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]}
    return set()


@pytest.mark.parametrize("name", RENDERINGS)
def test_services_and_policies_use_existing_ports(name: str) -> None:
    for _, container in containers(name):
        known = {port[field] for port in container["ports"] for field in ("name", "containerPort")}
        spoken_of = set().union(*(_named_ports(found) for found in rendered(name) if "spec" in found))
        assert spoken_of
        assert spoken_of <= known


@pytest.mark.parametrize("name", RENDERINGS)
def test_references_lead_to_existing_objects(name: str) -> None:
    """Check the names of Services, accounts and settings. Operators create Secrets; deploy/README.md names each."""
    there = {(found["kind"], found["metadata"]["name"]) for found in rendered(name)}
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for pod, container in containers(name):
        assert ("ServiceAccount", pod["serviceAccountName"]) in there
        for source in container.get("envFrom", ()):
            assert ("ConfigMap", source["configMapRef"]["name"]) in there
        for volume in pod.get("volumes", ()):
            assert "secret" not in volume or f"`{volume['secret']['secretName']}`" in readme
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())} or pod.get("initContainers")
    for route in of_kind(rendered(name), "GRPCRoute"):
        for backend in (found for rule in route["spec"]["rules"] for found in rule["backendRefs"]):
            assert (backend.get("kind", "Service"), backend["name"]) in there
    for scaled in of_kind(rendered(name), "ScaledObject") + of_kind(rendered(name), "HorizontalPodAutoscaler"):
        assert ("Deployment", scaled["spec"]["scaleTargetRef"]["name"]) in there


@pytest.mark.parametrize("name", RENDERINGS)
def test_pods_are_restricted(name: str) -> None:
    """The namespace enforces Pod Security `restricted`, and pods have no token of the Kubernetes API."""
    for pod, _ in containers(name):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        shared = pod.get("securityContext", {})
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = shared | container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] == 10001
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", RENDERINGS)
def test_requests_equal_limits(name: str) -> None:
    """The class is Guaranteed: evicted last, and independent of other pods. Workers divide the cores as threads."""
    for _, container in containers(name):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        found = settings(rendered(name), container)
        if "ANTIPHON_THREADS" in found:
            num_threads = int(found["ANTIPHON_THREADS"]) * int(found.get("ANTIPHON_WORKERS", 1))
            assert num_threads == int(resources["limits"]["cpu"])


def test_kserve_runs_the_container_of_the_deployment() -> None:
    """Its runtime copies sizes and settings; only the port's name, the model and the folder differ."""
    ((pod, container),), ((kserve_pod, runtime),) = containers("cpu"), containers("kserve")
    copied = ("image", "resources", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
    assert {name: runtime[name] for name in copied} == {name: container[name] for name in copied}
    assert settings(rendered("kserve"), runtime) == settings(rendered("cpu"), container)
    assert kserve_pod["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"]
    assert not of_kind(rendered("kserve"), "Deployment")


@pytest.mark.parametrize("name", RENDERINGS)
def test_image_tag_is_the_version_of_the_package(name: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    suffix = "-cuda" if "gpu" in name else ""
    for _, container in containers(name):
        assert container["image"] == f"antiphon:{version}{suffix}"
    for manifest in of_kind(rendered(name), "Deployment"):
        assert manifest["metadata"]["labels"]["app.kubernetes.io/version"] == version


def test_changed_setting_restarts_the_pods() -> None:
    def settings_name(literals: list[str]) -> str:
        generator = {"name": "antiphon", "namespace": "antiphon", "behavior": "merge", "literals": literals}
        objects = combine((), configMapGenerator=[generator])
        ((_, pod),) = pods(objects)
        return str(pod["containers"][0]["envFrom"][0]["configMapRef"]["name"])

    names = {settings_name([f"ANTIPHON_LOG_LEVEL={level}"]) for level in ("info", "debug")}
    assert len(names) == 2


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_number_of_replicas_is_set_in_one_place(name: str) -> None:
    """The number is set by an autoscaler or by the file: otherwise `kubectl apply` would reset the autoscaler's."""
    scalers = of_kind(rendered(name), "ScaledObject") + of_kind(rendered(name), "HorizontalPodAutoscaler")
    (deployment,) = of_kind(rendered(name), "Deployment")
    assert len(scalers) == (0 if "replicas" in deployment["spec"] else 1)


def test_both_autoscalers_have_the_same_rules() -> None:
    (scaled,) = of_kind(rendered("+autoscaling"), "ScaledObject")
    (plain,) = of_kind(rendered("+autoscaling-hpa"), "HorizontalPodAutoscaler")
    by_keda, by_itself = scaled["spec"], plain["spec"]
    assert by_itself["behavior"] == by_keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (by_itself["minReplicas"], by_itself["maxReplicas"]) == (
        by_keda["minReplicaCount"],
        by_keda["maxReplicaCount"],
    )
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in by_keda["triggers"]]
    values = [metric["pods"]["target"]["averageValue"] for metric in by_itself["metrics"]]
    assert [float(value.removesuffix("m")) / (1000 if value.endswith("m") else 1) for value in values] == thresholds


def test_kserve_has_the_scaling_rules_of_the_deployment() -> None:
    """Without the label `job`, which depends on how Prometheus finds KServe's pods."""
    (scaled,) = of_kind(rendered("+autoscaling"), "ScaledObject")
    (service,) = of_kind(rendered("kserve"), "InferenceService")
    predictor = service["spec"]["predictor"]
    asked = [one["external"] for one in predictor["autoScaling"]["metrics"]]
    assert [(one["metric"]["query"], one["target"]["averageValue"]) for one in asked] == [
        (trigger["metadata"]["query"].replace('job="antiphon",', ""), trigger["metadata"]["threshold"])
        for trigger in scaled["spec"]["triggers"]
    ]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (
        scaled["spec"]["minReplicaCount"],
        scaled["spec"]["maxReplicaCount"],
    )


def test_keda_triggers_have_only_known_keys() -> None:
    """A trigger's metadata is a map of strings for Kubernetes: schemas accept a misspelt key."""
    known = {"serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "authModes"}
    (scaled,) = of_kind(rendered("autoscaling"), "ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] == "AverageValue"  # fallback knows no other
        assert {"serverAddress", "query", "threshold"} <= trigger["metadata"].keys() <= known
    assert scaled["spec"]["fallback"]["replicas"] <= scaled["spec"]["maxReplicaCount"]


def test_components_that_need_others_are_documented() -> None:
    """The tests combine them in the order of the table in deploy/README.md."""
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for name, needed in PREREQUISITES.items():
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| `components/{name}`")]
        assert all(other in row.rpartition(" | ")[2] for other in needed), row


def test_network_policy_of_the_base_allows_no_egress() -> None:
    (policy,) = of_kind(rendered("cpu"), "NetworkPolicy")
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["spec"]["egress"] == []
    assert all(rule["from"] for rule in policy["spec"]["ingress"])


def test_adapter_rules_provide_the_metrics_of_the_autoscaler() -> None:
    text = (DEPLOY / "components" / "autoscaling-hpa" / "prometheus-adapter.yaml").read_text(encoding="utf-8")
    answered = {rule["seriesQuery"].partition("{")[0] for rule in yaml.safe_load(text)["rules"]["custom"]}
    (plain,) = of_kind(rendered("+autoscaling-hpa"), "HorizontalPodAutoscaler")
    assert {metric["pods"]["metric"]["name"] for metric in plain["spec"]["metrics"]} == answered


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


def monitored(overlay: str, kind: str, name: str = "antiphon") -> Manifest:
    (found,) = (held for held in of_kind(rendered(overlay), kind) if held["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize("overlay", ["monitoring", "production"])
def test_service_monitor_selects_the_service_and_names_the_job_antiphon(overlay: str) -> None:
    monitor, service = monitored(overlay, "ServiceMonitor")["spec"], monitored(overlay, "Service")
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "antiphon"
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports


@pytest.mark.parametrize("overlay", ["monitoring", "production"])
def test_config_map_has_the_dashboard_and_the_label_of_the_sidecar(overlay: str) -> None:
    held = monitored(overlay, "ConfigMap", "antiphon-dashboard")
    assert held["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert held["data"] == {FILE.name: FILE.read_text(encoding="utf-8")}
