"""Idle connections up to the limit of descriptors: connected clients are answered, without a busy loop."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator

from antiphon.client import Client
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import PATIENCE_S, ServerProcess
from tests.marks import hardship
from tests.reliability.footprint import cpu_s

pytestmark = hardship

MAX_FILES = 120
# Maximum share of one core of an idle server, over this time: a busy loop uses a whole core.
WATCHED_S, MAX_SHARE = 3.0, 0.25

# HTTP/2's preface and an empty SETTINGS frame.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@contextlib.contextmanager
def few_files() -> Iterator[ServerProcess]:
    prefix = ("sh", "-c", f'ulimit -n {MAX_FILES}; exec "$@"', "sh")
    with ServerProcess(SHIPPED_BUNDLE, prefix=prefix) as server:
        yield server


@contextlib.contextmanager
def idle(port: int, num: int) -> Iterator[None]:
    """Open connections that send only the preface, so that no handshake times out. The server may close some."""
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
            with contextlib.suppress(ConnectionError):
                connection.sendall(HELLO)
        yield


def test_server_answers_without_a_busy_loop_beside_idle_connections_up_to_the_limit() -> None:
    with few_files() as server, Client(server.target) as held:
        held.list_models()
        with idle(server.port, 2 * MAX_FILES):
            metrics = server.wait_for_metrics(lambda metrics: metrics["antiphon_connections_full"] == 1)
            assert metrics["process_open_fds"] < MAX_FILES  # some descriptors are reserved for scrapes and files
            before_s = cpu_s(server.process.pid)
            time.sleep(WATCHED_S)  # not a wait for an event: the CPU time is measured over this time
            assert cpu_s(server.process.pid) - before_s < MAX_SHARE * WATCHED_S
            assert held.list_models()
            check_refused(server)
        server.wait_for_metrics(lambda metrics: metrics["antiphon_connections_full"] == 0)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
            assert greeted(connection)
        server.process.terminate()
        code, log = server.finish()
        assert code == 0
        (line,) = (line for line in log.splitlines() if "connections are open" in line)
        assert re.search(r"WARNING .*\d+ connections are open, as many as .* further ones are closed", line)


def greeted(connection: socket.socket) -> bool:
    """Return whether the server answers on a connection: HTTP/2 begins with its settings."""
    try:
        connection.sendall(HELLO)
        return connection.recv(9) != b""
    except ConnectionError:
        return False


def check_refused(server: ServerProcess) -> None:
    """Check that a new connection is closed at once, instead of waiting without an answer."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as connection:
        assert not greeted(connection)


def test_max_connections_is_lowered_with_a_warning_to_the_limit_of_open_files() -> None:
    prefix = ("sh", "-c", f'ulimit -n {MAX_FILES}; exec "$@"', "sh")
    with ServerProcess(SHIPPED_BUNDLE, ["--max-connections", "5000"], prefix=prefix) as server:
        with idle(server.port, 2 * MAX_FILES):
            check_refused(server)
            assert server.metrics()["process_open_fds"] < MAX_FILES
        server.process.terminate()
        _, log = server.finish()
        assert f"{MAX_FILES} files may be open at once; 5000 connections" in log
