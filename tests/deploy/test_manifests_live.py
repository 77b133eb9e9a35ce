"""The manifests with the real server: it accepts every setting, starts with them, and exports the triggers' metrics."""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.server.settings import fields
from antiphon.server.settings_sources import flag_of
from tests.certificates import Authority
from tests.deploy.manifests import DEPLOY, RENDERINGS, Manifest, of_kind, pods, rendered, settings
from tests.integration.process import PATIENCE_S, ServerProcess, antiphon

pytestmark = pytest.mark.programs

SERVING = health_pb2.HealthCheckResponse.SERVING
METRIC = re.compile(r"\bantiphon_[a-z_]+")


def command(name: str) -> tuple[list[str], dict[str, str], Manifest]:
    """Return a rendering's command, its environment and its container."""
    ((_, pod),) = pods(rendered(name))
    (container,) = pod["containers"]
    return container["args"], settings(rendered(name), container), container


@functools.cache
def printed(arguments: tuple[str, ...], variables: frozenset[tuple[str, str]]) -> dict[str, object]:
    """Return the settings in effect, as the server prints them. Cached, because many renderings have the same."""
    done = antiphon(*arguments, "--print-config", env=dict(variables))
    assert done.returncode == 0, done.stderr.decode()
    return tomllib.loads(done.stdout.decode())


@pytest.mark.parametrize("name", RENDERINGS)
def test_server_accepts_every_setting(name: str) -> None:
    """The server ignores unknown variables, so each variable is compared with the settings in effect."""
    arguments, variables, _ = command(name)
    in_effect = printed(tuple(arguments), frozenset(variables.items()))
    assert variables
    for variable, value in variables.items():
        setting = variable.removeprefix("ANTIPHON_").lower()
        assert setting in fields(), variable
        found = in_effect[setting]
        same = float(value) == found if isinstance(found, int | float) and found not in (True, False) else None
        assert same if same is not None else value.lower() == str(found).lower(), variable


def test_wrong_setting_is_refused() -> None:
    arguments, variables, _ = command("cpu")
    done = antiphon(*arguments, "--print-config", env={**variables, "ANTIPHON_DRAIN_DELAY_S": "5s"})
    assert done.returncode == 2
    assert b"drain_delay_s" in done.stderr


def test_kserve_model_has_the_name_of_its_service_and_the_path_of_kserve() -> None:
    arguments, variables, _ = command("kserve")
    (service,) = of_kind(rendered("kserve"), "InferenceService")
    assert printed(tuple(arguments), frozenset(variables.items()))["models"] == {
        service["metadata"]["name"]: {"path": "/mnt/models"}
    }


def flags(variables: Mapping[str, str]) -> list[str]:
    """Return the same settings as flags, except threads and ports, which the test's server chooses itself."""
    kept = {name.removeprefix("ANTIPHON_").lower(): value for name, value in variables.items()}
    chosen = {"port", "metrics_port", "probe_port", "threads"}
    return [word for name, value in kept.items() if name not in chosen for word in (flag_of(name), value)]


def health(target: str, services: Sequence[str]) -> list[int]:
    """Return the health of each service on a plaintext port, as a kubelet requests it."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        requests = [health_pb2.HealthCheckRequest(service=service) for service in services]
        return [stub.Check(request, timeout=PATIENCE_S).status for request in requests]


def probed(container: Manifest) -> list[str]:
    """Return the services that a container's probes request."""
    return [container[f"{kind}Probe"]["grpc"].get("service", "") for kind in ("startup", "readiness", "liveness")]


@pytest.fixture(scope="module")
def exported() -> Iterator[set[str]]:
    """Return the names of metrics of the overlay `cpu`'s server, after its probes have succeeded."""
    _, variables, container = command("cpu")
    with ServerProcess(None, flags(variables)) as server:
        assert health(server.target.replace("0.0.0.0", "127.0.0.1"), probed(container)) == [SERVING] * 3
        yield {sample.partition("{")[0] for sample in server.metrics()}


def _asked_for() -> Iterator[tuple[str, str]]:
    """Return every object that scales or routes by a metric, as (location, text)."""
    components = DEPLOY / "components"
    yield from ((path.name, path.read_text(encoding="utf-8")) for path in components.glob("autoscaling*/*.yaml"))
    picker = components / "inference-pool" / "endpoint-picker.yaml"
    yield picker.name, picker.read_text(encoding="utf-8")
    (service,) = of_kind(rendered("kserve"), "InferenceService")
    yield "inferenceservice.yaml", yaml.safe_dump(service["spec"]["predictor"]["autoScaling"])


def test_every_metric_used_for_scaling_is_exported(exported: set[str]) -> None:
    asked = {name for _, text in _asked_for() for name in METRIC.findall(text)}
    assert {"antiphon_num_requests_waiting", "antiphon_kv_cache_usage_ratio"} <= asked
    assert asked <= exported


def test_tls_overlay_starts_a_server_whose_probes_need_no_certificate(tmp_path: Path) -> None:
    """The files of a Secret are in a folder of this test instead of the manifest's mount."""
    _, variables, container = command("mtls")
    (mount,) = container["volumeMounts"]
    authority = Authority(tmp_path, "ca")
    pair = authority.server()
    for name, source in {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.file}.items():
        (tmp_path / name).write_bytes(source.read_bytes())
    moved = {name: value.replace(mount["mountPath"], str(tmp_path)) for name, value in variables.items()}
    files = {value for name, value in moved.items() if name.startswith("ANTIPHON_TLS_")}
    assert files == {str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt")}

    with ServerProcess(None, [*flags(moved), "--probe-port", "0"]) as server:
        assert health(server.probe_target.replace("0.0.0.0", "127.0.0.1"), probed(container)) == [SERVING] * 3
        credentials = grpc.ssl_channel_credentials(authority.file.read_bytes())
        stranger = grpc.secure_channel(f"localhost:{server.port}", credentials)
        stub: Any = health_pb2_grpc.HealthStub(stranger)
        with stranger, pytest.raises(grpc.RpcError) as refusal:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.metrics()
