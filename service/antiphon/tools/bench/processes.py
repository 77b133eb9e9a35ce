"""Child processes of a benchmark: servers, with their memory and CPU time as the system reports them, and a client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from antiphon.client import Source
from antiphon.tools.bench.report import BenchFailure, Speed
from antiphon.tools.bench.waiting_device import StepTimes

_READY = re.compile(r"(?:antiphon|echo): ready(?:: .*)? on (?P<target>127[^,\s]+)")
# Much longer than any normal run: turns a hang into an error.
PATIENCE_S = 600
_CHILD_SERVERS = "antiphon.tools.bench.child_servers"


class Served:
    """Ready server process. Leaving the context ends it. module: what it runs, and its arguments.

    ready_s: seconds from the start of the process to its ready line. Raises BenchFailure if the line never appears.
    """

    def __init__(self, *module: str, stdin: int | None = None, cores: Collection[int] | None = None) -> None:
        """cores: those that it may use; None: all."""
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)
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
        return sum(map(_main_thread_cpu_s, (self._process.pid, *self._children())))

    def _children(self) -> list[int]:
        """Return the ids of its processes, oldest first."""
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]

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

    def _report(self) -> dict[str, Any]:
        """Return what a server of child_servers.py reports."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("\n")
        stdin.flush()
        report: dict[str, Any] = json.loads(stdout.readline())
        return report

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
        flags = _flags(rows, threads // workers)
        super().__init__(
            "antiphon.cli", "serve", str(bundle), *flags, "--workers", str(workers), "--log-level", "error"
        )


class EchoServer(Served):
    """Ready server that answers at once, without any work."""

    def __init__(self) -> None:
        super().__init__(_CHILD_SERVERS, "echo")


class StagedServer(Served):
    """Ready `antiphon serve` process whose stages are measured. It makes access lines, as in production."""

    def __init__(self, bundle: Path, *, rows: int, threads: int) -> None:
        arguments = (str(bundle), *_flags(rows, threads), "--log-level", "info")
        super().__init__(_CHILD_SERVERS, "stages", *arguments, stdin=subprocess.PIPE)
        self.seconds()  # from now on, access lines are not shown

    def seconds(self) -> tuple[dict[str, float], float]:
        """Return CPU seconds of the event loop since its start: of each stage, and of all of its work."""
        report = self._report()
        return report["stages"], report["all"]


class WaitingServer(Served):
    """Ready `antiphon serve` process with a device that only waits."""

    def __init__(
        self, bundle: Path, *, rows: int, cores: Collection[int], fronts: int = 0, front_cores: Collection[int] = ()
    ) -> None:
        """cores, front_cores: of the process of the engine, and of its fronts."""
        arguments = ("--device", "cuda", "--fronts", str(fronts), *_flags(rows, 1), "--log-level", "error")
        super().__init__(_CHILD_SERVERS, "waiting", str(bundle), *arguments, stdin=subprocess.PIPE, cores=cores)
        self._fronts = self._children()[1:]  # the engine comes first
        for pid in self._fronts:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), front_cores)

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds since the start of the process of the engine, and of all fronts."""
        engine, *fronts = self._children()
        return {"the engine's process": _process_cpu_s(engine), "fronts": sum(map(_process_cpu_s, fronts))}

    def times(self) -> tuple[StepTimes, float, float]:
        """Return what the device measured, and CPU seconds of the event loop and of the process, since the start."""
        report = self._report()
        return StepTimes(**report["device"]), report["loop_s"], report["process_s"]


@dataclass(frozen=True, slots=True)
class ClientRun:
    """Result of one client: its speed, the translations, seconds of each stream to its first token and its end, and CPU
    seconds of the client from the first request on."""

    speed: Speed
    texts: list[str]
    first_s: list[float]
    total_s: list[float]
    cpu_s: float


def run_client(
    target: str,
    sources: Sequence[Source],
    *,
    concurrency: int,
    max_new_tokens: int,
    kind: str = "streams",
    cores: Collection[int] | None = None,
) -> ClientRun:
    """Translate sources in a child process, `concurrency` at a time.

    kind: as in `client.py`. cores: those that it may use; None: all. Raises BenchFailure when the client fails.
    """
    module = "antiphon.tools.bench.client"
    command = (sys.executable, "-m", module, target, kind, str(concurrency), str(max_new_tokens))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        try:
            output, _ = process.communicate(json.dumps(list(sources)), timeout=PATIENCE_S)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise BenchFailure("the client failed; its error message is above")
    answer = json.loads(output)
    speed = Speed(num_tokens=answer["num_tokens"], seconds=answer["seconds"])
    return ClientRun(speed, answer["texts"], answer["first_s"], answer["total_s"], answer["cpu_s"])


def _flags(rows: int, threads: int) -> list[str]:
    """Return the flags of a server on free ports. threads: of each process."""
    settings = {"port": 0, "metrics-port": 0, "max-num-seqs": rows, "threads": threads}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def _main_thread_cpu_s(pid: int) -> float:
    return _thread_cpu_s(Path(f"/proc/{pid}/task/{pid}"))


def _process_cpu_s(pid: int) -> float:
    return sum(map(_thread_cpu_s, Path(f"/proc/{pid}/task").iterdir()))


def _thread_cpu_s(folder: Path) -> float:
    nanos, *_ = (folder / "schedstat").read_text(encoding="ascii").split()
    return int(nanos) / 1e9


def _environment() -> dict[str, str]:
    """Return this process's environment without the settings of a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
