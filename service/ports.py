"""Listening sockets: whether a port can be had, in words, and the one that serves /metrics."""

from __future__ import annotations

import socket
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server


class PortError(Exception):
    """A port cannot be listened on; the message names it and says why."""


def check_port(host: str, port: int) -> None:
    """Raise PortError where host:port cannot be bound now: gRPC itself would not say why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise PortError(f"port {port} on {host} cannot be used: {error.strerror or error}") from None


def serve_metrics(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """Serve a registry from a thread. Raises PortError."""
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise PortError(f"metrics port {port} on {host} cannot be used: {error.strerror or error}") from None
    return server
