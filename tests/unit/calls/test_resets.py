"""Connections that reset most of their calls are closed; others are not."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from antiphon.rpc.grpc_fixes.resets import Resets, disconnect


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
