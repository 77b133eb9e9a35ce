"""A server of one bundle as a child process, on loopback, for experiments that compare or measure served answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from antiphon.client import Client, Options, ServerError
from antiphon.errors import ModelError

_READY = re.compile(r"antiphon: ready: .* on (?P<target>\S+), metrics on ")
_PATIENCE_S = 60


class ServeError(ModelError):
    """The server of an experiment did not start; the message has its exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server: a client of it, and the id of its process."""

    client: Client
    pid: int

    @property
    def peak_memory_mb(self) -> float:
        """Largest resident memory of the process so far, in MB (10^6 bytes); Linux only."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        kib = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert kib is not None
        return int(kib[1]) * 1024 / 1e6


@contextmanager
def serving(bundle: Path, precision: str = "float32") -> Iterator[Server]:
    """Serve a bundle on one thread inside the context. Raises ServeError if the server does not start."""
    options = f"--port 0 --metrics-port 0 --threads 1 --precision {precision} --access-log errors".split()
    command = [sys.executable, "-m", "antiphon.cli", "serve", str(bundle), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = _READY.match(server.stdout.readline())
            if ready is None:
                raise ServeError(f"antiphon serve {bundle} ended with exit code {server.wait(_PATIENCE_S)}")
            with Client(ready["target"]) as client:
                yield Server(client=client, pid=server.pid)
        finally:
            server.terminate()


@contextmanager
def served(bundle: Path, precision: str = "float32") -> Iterator[Client]:
    """Serve a bundle as `serving` does; yield only the client."""
    with serving(bundle, precision) as server:
        yield server.client


def classify_all(client: Client, texts: Sequence[str]) -> list[str]:
    """Return the served label of each text, from 16 requests at a time. Raises ServerError if one is refused."""
    with ThreadPoolExecutor(16) as pool:
        return [answer.labels[0].label for answer in pool.map(client.classify, texts)]


def served_translations(client: Client, sources: Sequence[str], options: Options) -> list[str]:
    """Return the served translation of each source. Raises ServerError if the server refuses one of them."""
    texts = []
    for answer in client.generate_many(sources, options, concurrency=16):
        if isinstance(answer, ServerError):
            raise answer
        texts.append(answer.text)
    return texts
