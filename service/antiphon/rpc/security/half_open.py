"""TLS handshakes with a port of this process that are never finished.

A port may be shared with other processes (SO_REUSEPORT): the kernel chooses which of them receives a connection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A port of this process answers within milliseconds; a busy machine takes longer.
_TIMEOUT_S = 2.0
_MAX_FLIGHT_BYTES = 1 << 16
# With N processes, one connection of N is with this one: 64 processes miss it this often in 1 of 10 million renewals.
_MAX_ATTEMPTS = 1024
# Connections of this machine: over IPv4, over IPv6, which also lists those of IPv4 to an IPv6 socket.
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfOpen:
    """Connection whose client has read the server's certificate and not answered. leaf: that certificate in DER."""

    connection: socket.socket
    leaf: bytes

    def close(self) -> None:
        """Leave the handshake unfinished."""
        self.connection.close()


def begin_handshake(host: str, port: int) -> HalfOpen:
    """Connect to a port on a listening host, and do the first half of a TLS 1.3 handshake. Raises OSError."""
    with contextlib.ExitStack() as on_error:
        connection = on_error.enter_context(_connect(host, port))
        leaf = _read_leaf(connection)
        on_error.pop_all()
    return HalfOpen(connection=connection, leaf=leaf)


def begin_own_handshake(host: str, port: int) -> HalfOpen:
    """Begin handshakes with a shared port until one is with this process; the others are closed. Raises OSError."""
    for _ in range(_MAX_ATTEMPTS):
        handshake = begin_handshake(host, port)
        if is_own(handshake.connection):
            return handshake
        handshake.close()
    raise ConnectionError(f"none of {_MAX_ATTEMPTS} connections reached this process")


def is_own(connection: socket.socket) -> bool:
    """Return whether this process holds the other end of a connection, whose both ends are on this machine."""
    ends = (_as_in_table(connection.getpeername()), _as_in_table(connection.getsockname()))
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
                return f"socket:[{fields[9]}]" in _open_files()
    return False


def _as_in_table(name: tuple[Any, ...]) -> str:
    """Return an address and a port as the kernel's tables show them: words of 32 bits in this machine's order."""
    packed = ipaddress.ip_address(name[0].partition("%")[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{name[1]:04X}"


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield str(entry.readlink())


def _connect(host: str, port: int) -> socket.socket:
    *others, last = _reachable(host)
    for address in others:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), _TIMEOUT_S)
    return socket.create_connection((last, port), _TIMEOUT_S)


def _reachable(host: str) -> tuple[str, ...]:
    """Return the addresses at which a listening host answers: for wildcards, the loopback address of their family."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return (host,)
    if not address.is_unspecified:
        return (host,)
    # gRPC listens on IPv4 instead of "::" where the machine has no IPv6.
    return ("127.0.0.1",) if address.version == 4 else ("::1", "127.0.0.1")


def _read_leaf(connection: socket.socket) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _context().wrap_bio(incoming, outgoing)
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            connection.sendall(outgoing.read())
        else:  # the client's last messages stay in `outgoing` unsent
            leaf = client.getpeercert(binary_form=True)
            assert leaf is not None
            return leaf
        received = connection.recv(_MAX_FLIGHT_BYTES)
        if not received:
            raise ConnectionError("the port closed the connection before it showed a certificate")
        incoming.write(received)


def _context() -> ssl.SSLContext:
    """Return a context that accepts any certificate: the caller compares it with the expected one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # With TLS 1.2 the client would have to answer before its handshake is done.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    return context
