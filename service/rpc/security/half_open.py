"""TLS handshakes with a port of this process that are never finished."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from dataclasses import dataclass

# A port of this process answers within milliseconds; a busy machine takes longer.
_TIMEOUT_S = 2.0
_MAX_FLIGHT_BYTES = 1 << 16


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
