"""Containers in podman, without the privileges that Kubernetes' level "restricted" removes, and with fewer still."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.deploy.image_check.cgroup import Memory, memory_of

PATIENCE_S = 180
HARDENED = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")

# Settings for which `podman kube play` has no flags. runc and cgroupfs work without systemd. Limits that this machine's
# root cannot raise are lowered to the present ones.
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


class CheckError(Exception):
    """A check failed; the message has the reason."""


class Podman:
    """The podman program and its settings. options: of every `podman run`."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.options = tuple(options)
        path = folder / "containers.conf"
        path.write_text(_CONTAINERS_CONF)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(path)}
        self._folder = folder

    def run(self, *arguments: str) -> str:
        """Run podman to its end and return its output. Raises CheckError."""
        done = self.attempt(*arguments)
        if done.returncode:
            raise CheckError(f"podman {' '.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run podman to its end, with any exit code."""
        command = ["podman", *arguments]
        # If a container reaches its memory limit, a file `oom` is written to the working directory.
        return subprocess.run(
            command,
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def inspect(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("inspect", name))[0]
        return found

    @contextlib.contextmanager
    def files(self, image: str) -> Iterator[subprocess.Popen[bytes]]:
        """Write the files of an image as a tar archive to standard output."""
        name = self.run("create", image)
        try:
            with subprocess.Popen(
                ["podman", "export", name], env=self._environment, stdout=subprocess.PIPE
            ) as exporting:
                yield exporting
        finally:
            self.run("rm", name)


class Container:
    """Container, from its start to its removal at the end of the context; identified by its name or id."""

    def __init__(self, podman: Podman, name: str) -> None:
        self._podman = podman
        self.name = name

    @classmethod
    def start(
        cls,
        podman: Podman,
        image: str,
        arguments: Sequence[str] = (),
        *,
        memory: str | None = None,
        settings: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> Self:
        """Start the image without root, capabilities and writable files. memory: its limit, swap included."""
        limits = () if memory is None else (f"--memory={memory}", f"--memory-swap={memory}")
        variables = [f"--env={name}={value}" for name, value in (settings or {}).items()]
        options = (*HARDENED, *podman.options, *limits, *variables, *options)
        return cls(podman, podman.run("run", "-d", *options, image, *arguments))

    @property
    def pid(self) -> int:
        """Return the id of its first process on this machine."""
        return int(self._state()["Pid"])

    @property
    def address(self) -> str:
        networks = self._podman.inspect(self.name)["NetworkSettings"]["Networks"]
        return next(str(network["IPAddress"]) for network in networks.values())

    @property
    def log(self) -> str:
        done = self._podman.attempt("logs", self.name)
        return done.stdout + done.stderr

    def memory(self) -> Memory:
        return memory_of(self.pid)

    def ready_after_s(self) -> float:
        """Return seconds from the start of its first process to the server's ready line. Raises CheckError."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            for line in self._podman.attempt("logs", "--timestamps", self.name).stdout.splitlines():
                if "antiphon: ready" in line:
                    return _seconds_between(self._state()["StartedAt"], line.split()[0])
            if self._state()["Status"] not in ("created", "initialized", "running"):
                break
            time.sleep(0.1)
        raise CheckError(f"no server is ready; its log is: {self.log}")

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to its first process, which must run."""
        self._podman.run("kill", f"--signal={number.name}", self.name)

    def exit_code(self) -> int:
        return int(self._podman.run("wait", self.name))

    def stop(self) -> int:
        """Stop it with the image's stop signal, without a restart; return its exit code."""
        self._podman.run("stop", "--time=60", self.name)
        return int(self._state()["ExitCode"])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self._podman.attempt("exec", self.name, *command)

    def health(self) -> int:
        return self._podman.attempt("healthcheck", "run", self.name).returncode

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._podman.inspect(self.name)["State"]
        return state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._podman.attempt("rm", "--force", "--time=0", self.name)


@contextlib.contextmanager
def podman(options: Sequence[str]) -> Iterator[Podman]:
    """Yield podman with separate settings, which are removed at the end of the context."""
    with tempfile.TemporaryDirectory() as folder:
        yield Podman(Path(folder), options)


def _seconds_between(first: str, second: str) -> float:
    return (_time(second) - _time(first)).total_seconds()


def _time(text: str) -> datetime.datetime:
    """Read a time of RFC 3339 with nanoseconds, which Python cannot read."""
    date, _, rest = text.partition(".")
    digits = "".join(letter for letter in rest[:9] if letter.isdigit())
    zone = rest.lstrip("0123456789") or "Z"
    return datetime.datetime.fromisoformat(f"{date}.{digits[:6]:0<6}{zone.replace('Z', '+00:00')}")
