"""Listening sockets: a check that a port is free, and the server of /metrics with limits on its connections."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

# Time for an ended connection to close before a new one is refused.
_LEAVE_S = 1.0


class Scrapes:
    """Open connections with their ages. Thread-safe.

    A new connection beyond the limit ends the oldest one: a scrape takes milliseconds, so the oldest must be idle.

    most: maximum number of connections at once. longest_s: longest duration of a connection, even an active one.
    """

    def __init__(self, most: int, longest_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._longest_s = longest_s
        self._clock = clock
        self._since_s: dict[socket.socket, float] = {}  # oldest first
        self._changed = threading.Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Add a connection, and end the oldest one if there are too many. Return False if that one does not end."""
        with self._changed:
            if len(self._since_s) >= self._most:
                _end(next(iter(self._since_s)))
                self._changed.wait_for(lambda: len(self._since_s) < self._most, _LEAVE_S)
            if len(self._since_s) >= self._most:
                return False
            self._since_s[connection] = self._clock()
            return True

    def leave(self, connection: socket.socket) -> None:
        """Remove a connection that is about to be closed. It need not have been admitted."""
        with self._changed:
            self._since_s.pop(connection, None)
            self._changed.notify()

    def end_overdue(self) -> None:
        """End connections that have lasted too long."""
        with self._changed:
            latest_s = self._clock() - self._longest_s
            for connection, since_s in self._since_s.items():
                if since_s <= latest_s:
                    _end(connection)


def _end(connection: socket.socket) -> None:
    """Shut down both directions, so that a thread that reads or writes gets an error and closes the connection.

    Uses the plain socket's method even for TLS: that of the TLS socket would remove its state while the thread uses it.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


MAX_SCRAPES = 16
"""Maximum number of connections to the metrics port at once. Each takes a file descriptor and a thread."""
# A scrape takes milliseconds. A client that connects and sends nothing, or little, must not occupy a thread.
_SCRAPE_TIMEOUT_S = 10.0
# Errors of accept() if descriptors or memory ran out, and the delay before the next attempt.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_EXHAUSTED_WAIT_S = 0.5


class PortError(Exception):
    """A port cannot be opened. The message names the port and the reason."""


def check_port(host: str, port: int) -> None:
    """Raise PortError if host:port cannot be bound now: gRPC itself does not report the reason."""
    try:
        family, kind, protocol, _, address = _resolved(host, port)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortError(f"port {port} on {host} cannot be used: {error.strerror or error}") from None


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    tls: Callable[[], ssl.SSLContext] | None = None,
    *,
    timeout_s: float = _SCRAPE_TIMEOUT_S,
) -> WSGIServer:
    """Serve a registry from at most MAX_SCRAPES threads.

    tls: returns the TLS context of a new connection; None serves plain HTTP.
    timeout_s: longest time of a scrape, from its connection to its last byte.
    Raises PortError.
    """
    try:
        server = _MetricsServer(host, port, tls, timeout_s)
    except OSError as error:
        raise PortError(f"metrics port {port} on {host} cannot be used: {error.strerror or error}") from None
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


class _Handler(WSGIRequestHandler):
    """Handler of one scrape, without log lines."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Server with one thread per scrape. TLS handshakes run in these threads, so a slow one delays no other scrape."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None, timeout_s: float) -> None:
        self._tls = tls
        self._timeout_s = timeout_s
        self._scrapes = Scrapes(MAX_SCRAPES, timeout_s, time.monotonic)
        self.address_family, *_, address = _resolved(host, port)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its TLS handshake happens at the first read. Waits a moment if descriptors ran out."""
        try:
            connection, address = super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(_EXHAUSTED_WAIT_S)  # the connection stays queued, so the server would retry at once
            raise
        connection.settimeout(self._timeout_s)
        if self._tls is not None:
            connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection is admitted. The oldest one is closed if there are too many."""
        return self._scrapes.admit(request)

    def service_actions(self) -> None:
        """End scrapes that have lasted too long. Called twice a second, and after each connection."""
        self._scrapes.end_overdue()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, including one that has failed."""
        self._scrapes.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnects early or fails the TLS handshake."""
