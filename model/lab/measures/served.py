"""A server of one bundle as a child process, on loopback, for experiments that compare or measure served answers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from antiphon.client import Client, Options, ServerError

_READY = re.compile(r"antiphon: ready: .* on (?P<target>\S+), metrics on ")
_PATIENCE_S = 60


class ServeError(Exception):
    """The server of an experiment did not start; the message has its exit code."""


@contextmanager
def served(bundle: Path, precision: str = "float32") -> Iterator[Client]:
    """Serve a bundle on one thread inside the context; yield a client. Raises ServeError if it does not start."""
    options = f"--port 0 --metrics-port 0 --threads 1 --precision {precision} --access-log errors".split()
    command = [sys.executable, "-m", "antiphon.cli", "serve", str(bundle), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = _READY.match(server.stdout.readline())
            if ready is None:
                raise ServeError(f"antiphon serve {bundle} ended with exit code {server.wait(_PATIENCE_S)}")
            with Client(ready["target"]) as client:
                yield client
        finally:
            server.terminate()


def served_translations(client: Client, sources: Sequence[str], options: Options) -> list[str]:
    """Return the served translation of each source. Raises ServerError if the server refuses one of them."""
    texts = []
    for answer in client.generate_many(sources, options, concurrency=16):
        if isinstance(answer, ServerError):
            raise answer
        texts.append(answer.text)
    return texts
