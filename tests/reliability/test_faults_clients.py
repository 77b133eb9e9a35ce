"""Clients that are killed during a stream or go silent, and idle connections up to the limit of descriptors."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from antiphon.client import AsyncClient, Client
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import PATIENCE_S, ServerProcess, environment, is_idle
from tests.reliability.asking import LONG, Heard, streamed
from tests.reliability.footprint import check_nothing_is_left, cpu_s, settled, steady
from tests.reliability.sizes import size
from tests.reliability.stalling_proxy import StallingProxy

pytestmark = pytest.mark.hardship

NUM_KILLED = size("KILLED_CLIENTS", 2)
STREAMS_EACH = 8
SHORT_KEEPALIVE = ["--keepalive-time-s", "1", "--keepalive-timeout-s", "0.5"]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SHIPPED_BUNDLE, SHORT_KEEPALIVE) as server:
        yield server


async def alone(server: ServerProcess) -> tuple[str, ...]:
    async with AsyncClient(server.target) as client:
        return await streamed(client, LONG)


def killed_in_mid_stream(target: str) -> None:
    """Kill a client process after its streams have begun."""
    command = [sys.executable, "-m", "tests.reliability.client_process", "endless", target, str(STREAMS_EACH)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "first\n"
        client.send_signal(signal.SIGKILL)
        assert client.wait(PATIENCE_S) == -signal.SIGKILL


async def test_killed_clients_leave_no_resources_and_have_no_effect_on_others(server: ServerProcess) -> None:
    expected = await alone(server)
    before = await asyncio.to_thread(settled, server.process.pid, steady())
    async with AsyncClient(server.target) as neighbour:
        for _ in range(NUM_KILLED):
            beside = asyncio.ensure_future(streamed(neighbour, LONG))
            await asyncio.to_thread(killed_in_mid_stream, server.target)
            assert await beside == expected
    await check_nothing_is_left(server, before)
    ended = {name: value for name, value in server.metrics().items() if name.startswith("antiphon_cancellations_total")}
    assert NUM_KILLED <= sum(ended.values()) <= NUM_KILLED * STREAMS_EACH


async def test_half_open_connections_are_detected_and_closed(server: ServerProcess) -> None:
    expected = await alone(server)
    before = await asyncio.to_thread(settled, server.process.pid, steady())
    with StallingProxy(server.port) as proxy:
        async with AsyncClient(proxy.target) as lost, AsyncClient(server.target) as neighbour:
            firsts = [asyncio.Event() for _ in range(STREAMS_EACH)]
            heard = [Heard(defaultdict(str)) for _ in firsts]
            streams = [
                asyncio.ensure_future(streamed(lost, LONG, first=first, heard=one))
                for first, one in zip(firsts, heard, strict=True)
            ]
            await asyncio.gather(*(first.wait() for first in firsts))
            proxy.stall()
            assert await streamed(neighbour, LONG) == expected
            await asyncio.to_thread(server.wait_for_metrics, is_idle)
            assert all(one.is_beginning_of(expected) for one in heard)
            for stream in streams:
                stream.cancel()
        # The network reports no end of the connection: the server has closed it by itself.
        await check_nothing_is_left(server, before)


MAX_FILES = 120
# Maximum share of one core of an idle server, over this time: a busy loop uses a whole core.
WATCHED_S, MAX_SHARE = 3.0, 0.25
# HTTP/2's preface and an empty SETTINGS frame.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


FEW_FILES = ("sh", "-c", f'ulimit -n {MAX_FILES}; exec "$@"', "sh")


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
    with ServerProcess(SHIPPED_BUNDLE, prefix=FEW_FILES) as server, Client(server.target) as held:
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
    with ServerProcess(SHIPPED_BUNDLE, ["--max-connections", "5000"], prefix=FEW_FILES) as server:
        with idle(server.port, 2 * MAX_FILES):
            check_refused(server)
            assert server.metrics()["process_open_fds"] < MAX_FILES
        server.process.terminate()
        _, log = server.finish()
        assert f"{MAX_FILES} files may be open at once; 5000 connections" in log
