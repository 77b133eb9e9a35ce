"""Three load balancers over replicas, each with the configuration that deploy/ ships.

Only addresses and paths of deploy/balancing/ are changed. Each balancer has the documented step before the restart of a
replica, which is nothing for two of them, because they detect the restart.
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.deploy.tools import ROOT, tool
from tests.integration.process import PATIENCE_S

CONFIGS = ROOT / "deploy" / "balancing"
NAMES = ("round_robin", "envoy", "nginx")

Option = tuple[str, str | int]


@dataclass(kw_only=True)
class Balancer:
    """Target of a client, and the options of its channel.

    The client has no retry policy: gRPC retries only calls that have not reached a server.
    broken_off_with: status of a stream whose replica is lost. retrying: options of a client that retries the calls
    which the balancer does not retry; None if there are none.
    """

    name: str
    target: str
    broken_off_with: grpc.StatusCode
    options: list[Option] = field(default_factory=list)
    retrying: list[Option] | None = None

    def take_out(self, index: int) -> None:
        """Do the documented step before a replica is stopped."""

    def put_back(self, index: int) -> None:
        """Do the documented step after the new replica is ready."""


class Nginx(Balancer):
    """Running nginx whose configuration can be changed and reloaded."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, port: int, replicas: Sequence[int]) -> None:
        super().__init__(
            name="nginx",
            target=f"127.0.0.1:{port}",
            broken_off_with=grpc.StatusCode.INTERNAL,
            retrying=[("grpc.service_config", json.dumps({"methodConfig": _service_config()["methodConfig"]}))],
        )
        self._process, self._folder, self._port, self._replicas = process, folder, port, replicas

    def take_out(self, index: int) -> None:
        self._reload(down=index)

    def put_back(self, index: int) -> None:
        self._reload(down=None)

    def _reload(self, down: int | None) -> None:
        """Reload as `nginx -s reload` does; return when the old workers and their calls have ended."""
        before = _children(self._process.pid)
        write_nginx(self._folder, self._port, self._replicas, down)
        self._process.send_signal(signal.SIGHUP)
        _until(lambda: not before & _children(self._process.pid))


@contextlib.contextmanager
def balancer(name: str, replicas: Sequence[int]) -> Iterator[Balancer]:
    """Run the balancer NAME in front of servers on these ports of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        if name == "round_robin":
            yield _round_robin(replicas)
        elif name == "envoy":
            with _envoy(Path(folder), replicas) as envoy:
                yield envoy
        else:
            with _nginx(Path(folder), replicas) as nginx:
                yield nginx


def _round_robin(replicas: Sequence[int]) -> Balancer:
    """Use the client's load balancing: a list of addresses replaces the name of a headless Service."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in replicas)
    config = _service_config()
    without = {key: value for key, value in config.items() if key != "methodConfig"}
    return Balancer(
        name="round_robin",
        target=f"ipv4:{addresses}",
        broken_off_with=grpc.StatusCode.UNAVAILABLE,
        options=[("grpc.service_config", json.dumps(without))],
        retrying=[("grpc.service_config", json.dumps(config))],
    )


def _service_config() -> dict[str, Any]:
    """Return the service config that docs/SCALING.md gives for clients."""
    (found,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "SCALING.md").read_text(), re.DOTALL)
    config: dict[str, Any] = json.loads(found)
    assert config.keys() == {"loadBalancingConfig", "healthCheckConfig", "methodConfig"}
    return config


@contextlib.contextmanager
def _envoy(folder: Path, replicas: Sequence[int]) -> Iterator[Balancer]:
    program = tool("envoy", "run make deploy-tools")
    port, admin = free_ports(2)
    (folder / "envoy.yaml").write_text(envoy_config(port, admin, replicas))
    # Log errors only. --base-id: share no memory with another Envoy on this machine.
    flags = ("-c", str(folder / "envoy.yaml"), "-l", "error", "--use-dynamic-base-id", "--concurrency", "1")
    with _running([str(program), *flags]):
        _until(lambda: _num_healthy(admin) == len(replicas))
        yield Balancer(name="envoy", target=f"127.0.0.1:{port}", broken_off_with=grpc.StatusCode.INTERNAL)


def envoy_config(port: int, admin: int, replicas: Sequence[int]) -> str:
    """Return deploy/balancing/envoy.yaml with other addresses."""
    name = "- endpoint: {address: {socket_address: {address: antiphon.antiphon.svc.cluster.local, port_value: 50051}}}"
    endpoint = "- endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}"
    return _rendered(
        CONFIGS / "envoy.yaml",
        {
            "address: 0.0.0.0, port_value: 50050": f"address: 127.0.0.1, port_value: {port}",
            "port_value: 9901": f"port_value: {admin}",
            name: ("\n" + 14 * " ").join(endpoint.format(replica) for replica in replicas),
        },
    )


@contextlib.contextmanager
def _nginx(folder: Path, replicas: Sequence[int]) -> Iterator[Balancer]:
    program = tool("nginx", "run make deploy-tools, or install nginx")
    (port,) = free_ports(1)
    write_nginx(folder, port, replicas, None)
    command = [str(program), "-e", "stderr", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    with _running(command) as process:
        _until(lambda: _is_open(port))
        yield Nginx(process, folder, port, replicas)


def write_nginx(folder: Path, port: int, replicas: Sequence[int], down: int | None) -> None:
    """Write deploy/balancing/nginx.conf with other addresses. down: a replica that receives no new calls."""
    (line,) = [
        line for line in (CONFIGS / "nginx.conf").read_text().splitlines() if line.startswith("        server 1")
    ]
    servers = [
        line.replace("50051", str(replica)).replace(";", " down;" if index == down else ";")
        for index, replica in enumerate(replicas)
    ]
    changes = {
        line: "\n".join(servers),
        "listen 50050 http2;": f"listen 127.0.0.1:{port} http2;",
        "/dev/stdout": "/dev/null",
        "error_log stderr warn": "error_log stderr emerg",
        # A minute in production; here the timeout of the test.
        "keepalive_time 60s": "keepalive_time 1s",
    }
    text = _rendered(CONFIGS / "nginx.conf", changes).replace("/tmp/antiphon-nginx", f"{folder}/nginx")
    (folder / "nginx.conf").write_text(text)


def _rendered(path: Path, changes: Mapping[str, str]) -> str:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _until(condition: object) -> None:
    """Poll until a condition of another process is true; the process sends no event."""
    assert callable(condition)
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "the condition never became true"
        time.sleep(0.02)


def _num_healthy(admin: int) -> int:
    """Return the number of replicas to which Envoy sends calls."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/clusters?format=json", timeout=PATIENCE_S) as answer:
            clusters = json.load(answer).get("cluster_statuses", [])
    except urllib.error.URLError:
        return 0
    states = [host["health_status"] for cluster in clusters for host in cluster.get("host_statuses", [])]
    return sum(set(state) == {"eds_health_status"} for state in states)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _children(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.add(int(path.parent.name))
    return found
