"""Certificates of one gRPC port, renewed by a separate thread while it serves.

gRPC asks `_Offer.take` for new certificates at every connection, under a lock, and creates the connection's handshaker
after it has released that lock. New certificates replace a reference-counted factory of handshakers. If the last
reference goes while another thread is about to create a handshaker from the old factory, the process crashes
(ssl_security_connector.cc of gRPC core, seen in 1.85.1). Two rules prevent that:

- `take` returns None, which changes nothing, except once for each renewal.
- Before a renewal, the port's own process begins a handshake with the port and leaves it open: the guard. A handshaker
  holds a reference to its factory, so the old factory outlives the replacement by `_GUARD_S` - `_OFFER_S` at least.

A port may be shared with other processes (SO_REUSEPORT): the kernel chooses which of them receives a connection.
Upstream: grpc/grpc#36693. Cost: a thread a port, and three connections for each renewal.
Remove the guard and the offer once core holds a reference to the factory while it creates a handshaker. Nothing shows
that from outside: read `add_handshakers` of that file. tests/unit/security/test_port_certificates.py must still pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from antiphon.rpc.reloading import Reloading
from antiphon.rpc.tls import Certificates

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
    *addresses, last = _reachable(host)
    for address in addresses:
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


log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 20
"""Time after which a server ends an unfinished handshake, and therefore a guard."""

# Certificates are offered to gRPC only while the guard is younger than this.
_OFFER_S = HANDSHAKE_TIMEOUT_S / 4
# Age at which a guard is closed. Threads that hold on to the old factory need microseconds; they have 10 s.
_GUARD_S = HANDSHAKE_TIMEOUT_S * 3 / 4
_POLL_S = 1.0


class PortCertificates:
    """Certificates that one gRPC port presents. `credentials` are for this port only.

    needs_client: clients must present a certificate too. is_shared: other processes listen on the port too.
    on_failure: called for every renewal that failed.
    """

    def __init__(
        self,
        certificates: Reloading[Certificates],
        *,
        needs_client: bool,
        is_shared: bool = False,
        on_failure: Callable[[], None],
    ) -> None:
        self._certificates = certificates
        self._begin_handshake = begin_own_handshake if is_shared else begin_handshake
        self._on_failure = on_failure
        self._shown = certificates.current()
        # More than one after a renewal whose result is unknown.
        self._possible_leaves = {self._shown.leaf}
        self._offer = _Offer()
        self._guards: deque[tuple[float, HalfOpen]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._shown.grpc,
            self._offer.take,  # type: ignore[arg-type]  # the type stubs omit that None means no change
            require_client_authentication=needs_client,
        )

    def follow(self, host: str, port: int) -> None:
        """Start to check for new certificates once a second. host, port: address of the started server."""
        self._thread = threading.Thread(target=self._run, args=(host, port), name="certificates", daemon=True)
        self._thread.start()

    def end_renewals(self) -> None:
        """Check for new certificates no more. A renewal that the stopping server breaks off has not failed."""
        self._closing.set()

    async def close(self) -> None:
        """End renewals, and close the guards. Only for a server that has stopped."""
        self.end_renewals()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._close_guards(float("inf"))

    def _run(self, host: str, port: int) -> None:
        while not self._closing.wait(_POLL_S):
            self._close_guards(time.monotonic())
            self._look(host, port)

    def _close_guards(self, now_s: float) -> None:
        while self._guards and self._guards[0][0] <= now_s:
            self._guards.popleft()[1].close()

    def _look(self, host: str, port: int) -> None:
        new = self._certificates.current()
        if new is self._shown:
            return
        try:
            self._renew(new, host, port)
        except OSError as error:
            if self._closing.is_set():
                return
            log.error("port %d keeps its certificate and tries again: %s", port, error.strerror or error)
            self._on_failure()
        else:
            log.info("port %d presents the new certificate", port)

    def _renew(self, new: Certificates, host: str, port: int) -> None:
        """Make the port present new certificates. Raises OSError."""
        began_s = time.monotonic()
        guard = self._begin_handshake(host, port)
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(guard.close)
            if guard.leaf not in self._possible_leaves:
                raise ConnectionError(f"{host} presents a certificate that is not this server's")
            self._possible_leaves.add(new.leaf)
            self._offer.make(new.grpc, until_s=began_s + _OFFER_S)
            try:  # This connection takes the offer, unless a client's connection comes first.
                with contextlib.closing(self._begin_handshake(host, port)) as second:
                    shown = second.leaf
            finally:
                was_taken = self._offer.withdraw()
                if was_taken:
                    unless_taken.pop_all()
                    self._guards.append((began_s + _GUARD_S, guard))
        if not was_taken or shown != new.leaf:
            raise ConnectionError("gRPC did not take the new certificate")
        self._shown, self._possible_leaves = new, {new.leaf}


class _Offer:
    """Certificates for the next connection, returned once. Thread-safe: gRPC calls `take` from its own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offered: grpc.ServerCertificateConfiguration | None = None
        self._until_s = 0.0

    def make(self, offered: grpc.ServerCertificateConfiguration, *, until_s: float) -> None:
        """Offer certificates to the next connection before a time of the monotonic clock."""
        with self._lock:
            self._offered, self._until_s = offered, until_s

    def take(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the offered certificates once; None if there is no offer."""
        with self._lock:
            if self._offered is None or time.monotonic() >= self._until_s:
                return None
            taken, self._offered = self._offered, None
            return taken

    def withdraw(self) -> bool:
        """Withdraw the offer. Return whether it had been taken."""
        with self._lock:
            was_taken, self._offered = self._offered is None, None
            return was_taken
