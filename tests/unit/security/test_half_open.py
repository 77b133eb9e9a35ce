"""Connections of a port that several processes share: which of them are with this process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from antiphon.rpc.grpc_fixes.port_certificates import is_own

# Accepts one connection on the socket that it inherits, says so, and holds it.
_ACCEPT = (
    "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); c = s.accept(); print('here', flush=True); "
    "sys.stdin.read()"
)
ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@pytest.fixture(params=ADDRESSES, ids=["IPv4", "IPv6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, address = request.param
    with socket.create_server((address, 0), family=family) as made:
        yield made


def test_connection_that_this_process_accepted_is_its_own(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2]) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert is_own(client)
        assert not is_own(client)


def test_connection_over_ipv4_to_a_socket_of_both_families_is_its_own() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert is_own(client)


def test_connection_that_another_process_accepted_is_not(listener: socket.socket) -> None:
    number = listener.fileno()
    command = [sys.executable, "-c", _ACCEPT, str(number)]
    with (
        subprocess.Popen(command, pass_fds=[number], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"here\n"
        assert not is_own(client)
        other.stdin.close()
