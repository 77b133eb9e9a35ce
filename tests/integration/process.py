"""The real server and the real command line, as child processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

ANTIPHON = (sys.executable, "-m", "antiphon.cli")
# Much longer than any normal test: turns a hang into a failure.
PATIENCE_S = 120

_READY = re.compile(
    r"antiphon: ready: (?P<model>\S+) \((?P<precision>\w+)\)(?:, \S+ \(\w+\))* on (?P<target>\S+), "
    r"metrics on (?P<url>\S+?)(?:, admin on (?P<admin>\S+?))?(?:, probes on (?P<probe>\S+))?;"
)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the settings of a server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
    return kept | dict(changes or {})


def antiphon(
    *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*ANTIPHON, *arguments], input=stdin, capture_output=True, env=environment(env), timeout=timeout_s, check=False
    )


class ServerProcess:
    """Running `antiphon serve` on free ports. Leaving the context ends it if it still runs."""

    def __init__(
        self,
        bundle: Path | None,
        arguments: Sequence[str] = (),
        *,
        prefix: Sequence[str] = (),
        program: Sequence[str] = ANTIPHON,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """bundle: None if the arguments name the models. prefix: a command that runs the following command.

        program: in place of `antiphon`. env: changes of the environment.
        """
        ports = ("--port", "0", "--metrics-port", "0", "--threads", "1")
        # Not a pipe: it would not be read while the server runs, and a server with many log lines would block.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [*prefix, *program, "serve", *([] if bundle is None else [str(bundle)]), *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(env),
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        match = _READY.match(self.ready_line)
        if match is None:
            raise AssertionError(f"no ready line but {self.ready_line!r}; {self.finish()[1]}")
        self.model, self.precision, self.target, self.metrics_url, self.admin_target, self.probe_target = match.groups()

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    @property
    def metrics_port(self) -> int:
        return int(self.metrics_url.rpartition(":")[2].removesuffix("/metrics"))

    def metrics(self) -> dict[str, float]:
        """Return the samples of one scrape by name{label=value,...}, without the model's name for the first model."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_S) as response:
            text = response.read().decode()
        return {
            sample.name + _labels(sample.labels, self.model): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def wait_for_metrics(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Scrape until a condition is true; the state of another process is visible only there."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if condition(metrics := self.metrics()):
                return metrics
        raise AssertionError(f"the condition never became true; the metrics are {metrics}")

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return exit code and standard error. Keep the rest of standard output in `output`."""
        self.output, _ = self.process.communicate(timeout=PATIENCE_S)
        self._errors.seek(0)
        return self.process.returncode, self._errors.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


def num_submitted(metrics: Mapping[str, float]) -> float:
    """Return the number of requests that the engine has scheduled, of every task and priority."""
    return sum(value for key, value in metrics.items() if key.startswith("antiphon_requests_submitted_total"))


def is_idle(metrics: Mapping[str, float]) -> bool:
    """Return whether nothing waits, nothing runs and every block is free."""
    busy = ("num_requests_waiting", "num_requests_running", "kv_cache_blocks{use=self}", "kv_cache_blocks{use=cross}")
    return all(metrics.get(f"antiphon_{name}", 0.0) == 0.0 for name in busy)


def _labels(labels: Mapping[str, str], model: str) -> str:
    kept = [f"{name}={value}" for name, value in labels.items() if (name, value) != ("model_name", model)]
    return "{" + ",".join(kept) + "}" if kept else ""


async def terminated(server: ServerProcess, channel: grpc.aio.Channel, number: int = signal.SIGTERM) -> None:
    """Send a signal to a ready server, and wait until it reports that it is not serving."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    server.process.send_signal(number)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
