"""Clients that disappear: killed during a stream, or behind a connection that has gone silent."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest

from antiphon.client import AsyncClient
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import PATIENCE_S, ServerProcess, environment, is_idle
from tests.marks import hardship
from tests.reliability.asking import LONG, Heard, streamed
from tests.reliability.footprint import Footprint, settled, steady
from tests.reliability.sizes import size
from tests.reliability.stalling_proxy import StallingProxy

pytestmark = hardship

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


async def check_nothing_is_left(server: ServerProcess, before: Footprint) -> None:
    """Wait in another thread until the resources are as before; the event loop closes connections of this side."""
    await asyncio.to_thread(server.wait_for_metrics, is_idle)

    def is_as_before(held: Footprint) -> bool:
        return held.descriptors <= before.descriptors

    assert is_as_before(await asyncio.to_thread(settled, server.process.pid, is_as_before))


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
