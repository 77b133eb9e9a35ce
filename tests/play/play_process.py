"""The page's web server as a child process, and requests to it without a browser."""

import http.client
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from tests.integration.process import ANTIPHON, PATIENCE_S, environment

_PRINTED = re.compile(
    r"antiphon play: (?P<url>http://127\.0\.0\.1:(?P<port>\d+)) shows the models of \S+; Ctrl-C ends it"
)


class Addressed(Protocol):
    """Addresses of a server: those of a ServerProcess."""

    target: str
    metrics_url: str
    admin_target: str | None


@dataclass(slots=True)
class Addresses:
    """Address of a server without metrics and without an admin service."""

    target: str
    metrics_url: str = "http://127.0.0.1:9/metrics"  # the port of the discard protocol: nothing listens
    admin_target: str | None = None


class PlayProcess:
    """Running `antiphon play` over a server, on a free port. Leaving the context ends it."""

    def __init__(self, server: Addressed, arguments: Sequence[str] = ()) -> None:
        addresses = ["--target", server.target, "--metrics-url", server.metrics_url]
        if server.admin_target is not None:
            addresses += ["--admin-target", server.admin_target]
        self.process = subprocess.Popen(
            [*ANTIPHON, "play", "--port", "0", *addresses, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = _PRINTED.match(line)
        if found is None:
            raise AssertionError(f"no address but {line!r}")
        self.url, self.port = found["url"], int(found["port"])

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of one request. headers replace those of a client that is no browser."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of an answer, which must be a success."""
        status, _, answer = self.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
        assert status == 200, answer
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)
