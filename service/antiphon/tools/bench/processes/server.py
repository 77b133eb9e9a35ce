"""The real server and a real client as child processes, with the server's memory as the system reports it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from antiphon.client import Source
from antiphon.tools.bench.report import BenchFailure, Speed

_READY = re.compile(r"(?:antiphon|echo): ready(?:: .*)? on (?P<target>127[^,\s]+)")
# Much longer than any normal run: turns a hang into an error.
PATIENCE_S = 600


class Served:
    """Ready server process. Leaving the context ends it. module: what it runs, and its arguments.

    ready_s: seconds from the start of the process to its ready line. Raises BenchFailure if the line never appears.
    """

    def __init__(self, *module: str) -> None:
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        assert self._process.stdout is not None
        match = _READY.match(self._process.stdout.readline())
        self.ready_s = time.perf_counter() - started_s
        if match is None:
            self._end()
            raise BenchFailure("the server did not start; its error message is above")
        self.target = match["target"]

    @property
    def loop_cpu_s(self) -> float:
        """CPU time of its event loop, the main thread; of all event loops, if it has several processes."""
        pid = self._process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return sum(_main_thread_cpu_s(worker) for worker in (str(pid), *workers))

    def memory_mb(self, field: str) -> float:
        """Return a field of /proc/PID/status of the server, VmRSS or VmHWM, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return int(status.partition(f"{field}:")[2].split()[0]) * 1024 / 1e6

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class BenchServer(Served):
    """Ready `antiphon serve` process on free loopback ports."""

    def __init__(self, bundle: Path, *, rows: int, threads: int, workers: int = 1) -> None:
        """threads: of all workers together."""
        settings = {
            "port": 0, "metrics-port": 0, "max-num-seqs": rows, "threads": threads // workers, "log-level": "error",
            "workers": workers,
        }  # fmt: skip
        flags = [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]
        super().__init__("antiphon.cli", "serve", str(bundle), *flags)


class EchoServer(Served):
    """Ready server that answers at once, without any work."""

    def __init__(self) -> None:
        super().__init__("antiphon.tools.bench.processes.echo")


def run_client(
    target: str, sources: Sequence[Source], *, concurrency: int, max_new_tokens: int, kind: str = "streams"
) -> tuple[Speed, list[str]]:
    """Translate sources in a child process, `concurrency` at a time. Return the speed and the translations.

    kind: as in `client.py`. Raises BenchFailure when the client fails.
    """
    module = "antiphon.tools.bench.processes.client"
    ended = subprocess.run(
        (sys.executable, "-m", module, target, kind, str(concurrency), str(max_new_tokens)),
        input=json.dumps(list(sources)), stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
        env=_environment(),
    )  # fmt: skip
    if ended.returncode != 0:
        raise BenchFailure("the client failed; its error message is above")
    answer = json.loads(ended.stdout)
    return Speed(num_tokens=answer["num_tokens"], seconds=answer["seconds"]), answer["texts"]


def _main_thread_cpu_s(pid: str) -> float:
    nanos, *_ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
    return int(nanos) / 1e9


def _environment() -> dict[str, str]:
    """Return this process's environment without the settings of a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
