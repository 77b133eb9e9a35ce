"""A real Prometheus with the laptop's configuration and a shorter scrape interval."""

from __future__ import annotations

import json
import math
import socket
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.laptop.watch import name_servers, prometheus_command, start, wait_ready, write_config
from tests.deploy.tools import tool

PACKAGE = "Debian's package prometheus, or `make deploy-tools`"
PATIENCE_S = 60
# Rates then have points within two seconds.
INTERVAL = "500ms"


@dataclass(frozen=True, slots=True)
class Sample:
    """Element of an instant vector."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def ask(self, expression: str) -> list[Sample]:
        """Return the current instant vector of an expression, without NaN."""
        found = self.get("query", query=expression)["result"]
        samples = [Sample(one["metric"], float(one["value"][1])) for one in found]
        return [sample for sample in samples if not math.isnan(sample.value)]

    def get(self, path: str, **parameters: str) -> Any:
        """Return the field `data` of the API's answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return json.load(response)["data"]

    def wait(self, condition: Callable[[Prometheus], bool]) -> None:
        """Poll until a condition is true, because Prometheus does not report its scrapes."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition(self):
            if time.monotonic() > end_s:
                raise AssertionError("the condition never became true")


@contextmanager
def prometheus(servers: Sequence[str]) -> Iterator[Prometheus]:
    """Run Prometheus for servers, given by the addresses of their metrics. Skips the test if it is not installed."""
    program = tool("prometheus", PACKAGE)
    with tempfile.TemporaryDirectory() as scratch:
        folder, address = Path(scratch), f"127.0.0.1:{free_port()}"
        write_config(folder, alertmanager=None, interval=INTERVAL)
        name_servers(folder, servers)
        process = start(prometheus_command(program, folder, folder / "data", address))
        try:
            wait_ready(f"http://{address}/-/ready", process)
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def free_port() -> int:
    """Return a free port, because Prometheus does not report the port that it chooses."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
