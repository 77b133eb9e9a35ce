"""Certificates of one gRPC port, renewed by a separate thread while it serves.

gRPC asks `_Offer.take` for new certificates at every connection, under a lock, and creates the connection's handshaker
after it has released that lock. New certificates replace a reference-counted factory of handshakers. If the last
reference goes while another thread is about to create a handshaker from the old factory, the process crashes
(ssl_security_connector.cc of gRPC core, seen in 1.85.1). Two rules prevent that:

- `take` returns None, which changes nothing, except once for each renewal.
- Before a renewal, the port's own process begins a handshake with the port and leaves it open: the guard. A handshaker
  holds a reference to its factory, so the old factory outlives the replacement by `_GUARD_S` - `_OFFER_S` at least.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import grpc

from antiphon.rpc.security.half_open import HalfOpen, begin_handshake, begin_own_handshake
from antiphon.rpc.security.reload import Reloading
from antiphon.rpc.security.tls import Certificates

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
