"""Servers of the same bundle. Each one can be killed, or restarted at its address."""

import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess

ENDED = "antiphon_request_success_total"


class Replicas:
    """Servers of the shipped bundle, with one thread and separate ports each. Leaving the context ends them."""

    def __init__(self, count: int, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)
        self._servers = [self._start(0) for _ in range(count)]

    @property
    def ports(self) -> list[int]:
        """Return the addresses of all replicas, stopped ones included."""
        return [server.port for server in self._servers]

    def num_answered(self) -> list[int]:
        """Return the requests that each replica has answered since its start, from its metrics."""
        return [_answered(server.metrics()) for server in self._servers]

    def kill(self, index: int) -> None:
        server = self._servers[index]
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

    def leave(self, index: int) -> int:
        """Stop one replica with SIGTERM, as an orchestrator does. Return its exit code after it has ended."""
        server = self._servers[index]
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.finish()
        return code

    def restart(self, index: int) -> None:
        """Start a new replica at an old address; return when it is ready."""
        port = self._servers[index].port
        self._servers[index].__exit__(None, None, None)
        self._servers[index] = self._start(port)

    def wait_until_answering(self, index: int) -> None:
        """Return when requests reach a replica and are answered."""
        before = _answered(self._servers[index].metrics())
        self._servers[index].wait_for_metrics(lambda metrics: _answered(metrics) > before)

    def wait_until_busy(self, index: int) -> None:
        self._servers[index].wait_for_metrics(lambda metrics: metrics["antiphon_num_requests_running"] > 0)

    def _start(self, port: int) -> ServerProcess:
        # The later flag holds.
        return ServerProcess(SHIPPED_BUNDLE, [*self._arguments, "--port", str(port)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.__exit__(kind, error, traceback)


def _answered(metrics: dict[str, float]) -> int:
    return int(sum(value for name, value in metrics.items() if name.startswith(ENDED)))
