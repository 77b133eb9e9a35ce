"""Listening sockets: whether a port can be had, in words, and the one that serves /metrics."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

# A scrape takes milliseconds; who connects and says nothing must not keep a thread.
_SCRAPE_TIMEOUT_S = 10.0


class PortError(Exception):
    """A port cannot be listened on; the message names it and says why."""


def check_port(host: str, port: int) -> None:
    """Raise PortError where host:port cannot be bound now: gRPC itself would not say why."""
    try:
        family, kind, protocol, _, address = _resolved(host, port)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortError(f"port {port} on {host} cannot be used: {error.strerror or error}") from None


def serve_metrics(
    host: str, port: int, registry: CollectorRegistry, tls: Callable[[], ssl.SSLContext] | None = None
) -> WSGIServer:
    """Serve a registry from threads. tls: the context of each new connection; None is http. Raises PortError."""
    try:
        server = _MetricsServer(host, port, tls)
    except OSError as error:
        raise PortError(f"metrics port {port} on {host} cannot be used: {error.strerror or error}") from None
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _resolved(host: str, port: int) -> tuple[Any, ...]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


class _Handler(WSGIRequestHandler):
    """One scrape, which logs nothing."""

    timeout = _SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each scrape; the handshake is the scrape's own, so that a slow one holds up nobody."""

    daemon_threads = True

    def __init__(self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None) -> None:
        self._tls = tls
        self.address_family, *_, address = _resolved(host, port)
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, to be encrypted at its first byte."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client that breaks off, or cannot be agreed with, to itself."""
