"""How a gRPC server listens: limits of its connections, its address, its credentials."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from antiphon.service.network.ports import PortError
from antiphon.service.security.access_settings import AccessSettings

# A client may ping this often; gRPC's own default of 5 minutes drops clients behind a short-lived NAT.
_MIN_CLIENT_PING_MS = 10_000
# For TLS, and for the first bytes of HTTP/2: who says nothing holds a descriptor. gRPC's own default is two minutes.
_HANDSHAKE_TIMEOUT_MS = 20_000

# For the last bytes of calls that have ended, and for clients that watch the health.
_CLOSE_GRACE_S = 0.5

Option = tuple[str, int]

OTHER_PORT_CONNECTIONS = 64
"""Connections to the probe port, and to the admin port: a few clients each."""

PROBE_OPTIONS: tuple[Option, ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1024),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", OTHER_PORT_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
)
"""Of a port that anybody may ask: a few probes at once, with the name of a service each."""


def channel_options(settings: AccessSettings) -> list[Option]:
    """gRPC's options of the port that models are asked at."""
    limits: dict[str, float | None] = {
        "grpc.max_send_message_length": settings.max_response_bytes,
        "grpc.max_allowed_incoming_connections": settings.max_connections,
        "grpc.max_connection_age_ms": _in_ms(settings.max_connection_age_s),
        "grpc.max_connection_age_grace_ms": _in_ms(settings.max_connection_age_grace_s),
        "grpc.max_connection_idle_ms": _in_ms(settings.max_connection_idle_s),
    }
    return [
        ("grpc.so_reuseport", 0),  # on, two servers would share a port in silence
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        # Beyond the first, calls are refused at random up to the second: here one limit, and no chance.
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        # What gRPC really waits for; left out it is a minute, whatever the line before says.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_CLIENT_PING_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        *((name, int(value)) for name, value in limits.items() if value is not None),
    ]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Listen; the port. Raises PortError. credentials: None is plaintext."""
    try:
        if credentials is None:
            return server.add_insecure_port(address_of(host, port))
        return server.add_secure_port(address_of(host, port), credentials)
    except RuntimeError:  # taken since check_port looked
        raise PortError(f"port {port} on {host} cannot be used") from None


@contextlib.asynccontextmanager
async def listening(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> AsyncIterator[int]:
    """Serve on a port while entered; the port. Raises PortError."""
    bound = bind(server, host, port, credentials)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(_CLOSE_GRACE_S)


@contextlib.asynccontextmanager
async def listening_to_the_end(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> AsyncIterator[int]:
    """Serve on a port until the process ends, beyond the context that is entered; the port. Raises PortError.

    A gRPC server that stops answers CANCELLED to whatever it had not taken up by then, and to whatever comes before its
    GOAWAY is heard (grpc/grpc#41785): a status that says that the caller gave up, and that most balancers do not retry.
    A connection that ends says UNAVAILABLE instead. Only an exception stops the server.
    """
    bound = bind(server, host, port, credentials)
    await server.start()
    try:
        yield bound
    except BaseException:
        await server.stop(None)
        raise


def address_of(host: str, port: int) -> str:
    """As targets are written."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000)
