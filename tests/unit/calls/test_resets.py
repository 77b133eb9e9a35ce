"""Connections that are closed: those that reset most of their calls, and those whose other end is gone."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from antiphon.rpc.grpc_fixes.resets import Resets, disconnect
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.serving import Gate, asking, serving


class Connections:
    """Records closed connections instead of closing them, and reports each."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.num_reported = 0
        self.now_s = 0.0
        self._reported = threading.Event()
        self.resets = Resets(self._report, self._close, lambda: self.now_s)

    def end(self, number: int, *, is_reset: bool) -> None:
        for _ in range(number):
            self.resets.ended("ipv4:127.0.0.1:4242", is_reset=is_reset)

    async def all_reported(self) -> None:
        assert await asyncio.to_thread(self._reported.wait, 60)

    def _close(self, peer: str) -> bool:
        self.closed.append(peer)
        return True

    def _report(self) -> None:
        self.num_reported += 1
        self._reported.set()


async def test_connection_that_resets_most_of_many_calls_is_closed_once() -> None:
    connections = Connections()
    connections.end(200, is_reset=False)
    connections.end(299, is_reset=True)
    assert connections.closed == []
    connections.end(1, is_reset=True)
    await connections.all_reported()
    assert connections.closed == ["ipv4:127.0.0.1:4242"]
    assert connections.num_reported == 1


@pytest.mark.parametrize(("answered", "reset"), [(600, 600), (0, 499), (10_000, 5_000)])
async def test_connection_stays_open_when_it_resets_few_calls_or_half_of_them(answered: int, reset: int) -> None:
    connections = Connections()
    connections.end(answered, is_reset=False)
    connections.end(reset, is_reset=True)
    assert connections.closed == []


async def test_resets_are_forgotten_after_a_while() -> None:
    connections = Connections()
    for _ in range(5):
        connections.end(400, is_reset=True)
        connections.now_s += 11
    assert connections.closed == []


@pytest.mark.parametrize(
    ("family", "host", "shown"), [("AF_INET", "127.0.0.1", "ipv4:127.0.0.1"), ("AF_INET6", "::1", "ipv6:%5B::1%5D")]
)
def test_disconnect_closes_only_the_connection_of_the_given_peer(family: str, host: str, shown: str) -> None:
    kind = getattr(socket, family)
    with socket.socket(kind) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        with (
            socket.socket(socket.AF_UNIX),  # of another kind
            socket.create_connection(listener.getsockname()[:2]) as first,
            socket.create_connection(listener.getsockname()[:2]) as second,
        ):
            accepted = [listener.accept()[0] for _ in range(2)]
            assert disconnect(f"{shown}:{first.getsockname()[1]}")
            first.settimeout(60)
            assert first.recv(1) == b""
            accepted[1].sendall(b"x")
            assert second.recv(1) == b"x"
            for one in accepted:
                one.close()


@pytest.mark.parametrize("peer", ["unix:/run/antiphon", "unix:", "ipv4:127.0.0.1:1", "ipv4:127.0.0.1", ""])
def test_disconnect_finds_no_connection_of_an_unknown_peer(peer: str) -> None:
    assert not disconnect(peer)


class Wire:
    """Forwards bytes between a client and a server until `cut`. Then it discards them and closes nothing."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._may_carry = asyncio.Event()
        self._may_carry.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        """Forward bytes until the context exits. Yields the address for clients."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._may_carry.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.ensure_future(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.closing(target):
            while data := await source.read(65536):
                await self._may_carry.wait()
                target.write(data)


async def test_half_open_connection_is_closed_and_its_requests_are_cancelled() -> None:
    async with serving(keepalive_time_s=1, keepalive_timeout_s=0.5) as served:
        gate, wire = Gate(served.runner), Wire(served.target)
        async with wire.laid() as target, grpc.aio.insecure_channel(target) as channel:
            call = InferenceServiceStub(channel).Generate(asking((30, 30)))
            assert await asyncio.to_thread(gate.reached.wait, 60)
            wire.cut()
            async with asyncio.timeout(60):
                await served.calls.wait_until_idle()
            gate.open()
            assert await asyncio.to_thread(served.engine.drain, 60)
            call.cancel()
        assert len(served.runner.decoded_rows) == 1
        labels = {"model_name": "fake", "stage": "running", "cause": "client"}
        assert served.registry.get_sample_value("antiphon_cancellations_total", labels) == 1
