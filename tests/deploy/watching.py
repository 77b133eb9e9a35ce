"""A real Prometheus and a real Alertmanager with the shipped rules, and a receiver of their notices.

They use free ports of loopback and end with the context. Prometheus reads its targets from a file, so that a test
controls when a server is monitored, and under which name.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.laptop.watch import start, wait_ready
from tests.deploy.scaling import scaled_alertmanager, scaled_rules
from tests.deploy.scraping import free_port
from tests.deploy.tools import tool
from tests.integration.process import PATIENCE_S

PROMETHEUS = "Debian's package prometheus (`make deploy-tools`)"
ALERTMANAGER = "Debian's package prometheus-alertmanager (`make deploy-tools`)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Alert of a message from Alertmanager; instance is empty for an alert over all replicas."""

    name: str
    instance: str
    is_firing: bool
    description: str
    at_s: float  # of time.monotonic()


class Receiver:
    """Receives Alertmanager's webhook messages. A waiting caller also gets the notices that arrived before."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Do not log requests."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def wait(
        self, name: str, instance: str, *, is_firing: bool, since: int = 0, within_s: float = PATIENCE_S
    ) -> Notice:
        """Return the first matching notice after the first `since` ones."""

        def found() -> Notice | None:
            wanted = (name, instance, is_firing)
            for notice in self._notices[since:]:
                if (notice.name, notice.instance, notice.is_firing) == wanted:
                    return notice
            return None

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, within_s):
                heard = [notice.name for notice in self._notices if notice.is_firing]
                raise AssertionError(f"{name} of {instance!r}: no notice, firing={is_firing}; heard of {heard}")
            notice = found()
        assert notice is not None
        return notice

    @property
    def num_heard(self) -> int:
        with self._changed:
            return len(self._notices)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            for alert in message["alerts"]:
                self._notices.append(
                    Notice(
                        name=alert["labels"]["alertname"],
                        instance=alert["labels"].get("instance", ""),
                        is_firing=alert["status"] == "firing",
                        description=alert["annotations"]["description"],
                        at_s=time.monotonic(),
                    )
                )
            self._changed.notify_all()


class Watch:
    """Monitoring of servers: the receiver, and the targets that Prometheus scrapes."""

    def __init__(self, receiver: Receiver, folder: Path, url: str) -> None:
        self.receiver = receiver
        self._folder, self._url = folder, url

    def targets(self, ports: Mapping[str, int]) -> None:
        """Scrape these metrics ports, each with its name."""
        groups = [{"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in ports.items()]
        temporary = self._folder / "targets.tmp"
        temporary.write_text(json.dumps(groups))
        temporary.replace(self._folder / "targets.json")  # the file is replaced atomically

    def query(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{query}", timeout=PATIENCE_S) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return result

    def rule_errors(self) -> list[str]:
        with urllib.request.urlopen(f"{self._url}/api/v1/rules", timeout=PATIENCE_S) as response:
            groups = json.load(response)["data"]["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]


@contextlib.contextmanager
def watching(scale: float, scrape_ms: int = 500) -> Iterator[Watch]:
    """Run Prometheus and Alertmanager with the shipped rules in 1 / scale of the time."""
    prometheus, alertmanager = tool("prometheus", PROMETHEUS), tool("prometheus-alertmanager", ALERTMANAGER)
    with tempfile.TemporaryDirectory() as name, Receiver() as receiver, contextlib.ExitStack() as stack:
        folder = Path(name)
        _write(folder / "alertmanager.yaml", scaled_alertmanager(scale, receiver.url))
        manager = _free_address()
        flags = [f"--config.file={folder}/alertmanager.yaml", f"--storage.path={folder}/alertmanager"]
        flags += [f"--web.listen-address={manager}", "--cluster.listen-address="]
        stack.enter_context(_running([str(alertmanager), *flags], f"http://{manager}/-/ready"))
        _write(folder / "rules.yaml", scaled_rules(scale))
        _write(folder / "prometheus.yaml", _configuration(manager, scrape_ms))
        address = _free_address()
        flags = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
        # Alertmanager drops an alert that is not sent again; here, rules are evaluated much more often than that.
        flags += [f"--web.listen-address={address}", "--rules.alert.resend-delay=1s"]
        watch = Watch(receiver, folder, f"http://{address}")
        watch.targets({})
        stack.enter_context(_running([str(prometheus), *flags], f"http://{address}/-/ready"))
        yield watch


def _configuration(manager: str, scrape_ms: int) -> dict[str, Any]:
    interval = f"{scrape_ms}ms"
    every = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    return {
        "global": every,
        "rule_files": ["rules.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
        "scrape_configs": [{"job_name": "antiphon", "file_sd_configs": [{"files": ["targets.json"]}]}],
    }


def _write(path: Path, document: object) -> None:
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def _free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def _running(command: list[str], ready_url: str) -> Iterator[None]:
    """Run a program; yield when it reports that it is ready."""
    process = start([*command, "--log.level=error"])
    try:
        wait_ready(ready_url, process)
        yield
    finally:
        process.kill()
        process.wait(PATIENCE_S)
