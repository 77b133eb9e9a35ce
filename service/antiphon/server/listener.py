"""Listening ports of a gRPC server: connection limits, address and credentials."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from antiphon.rpc.access_settings import AccessSettings
from antiphon.rpc.grpc_fixes.port_certificates import HANDSHAKE_TIMEOUT_S, PortCertificates
from antiphon.rpc.ports import PortError

# Time for the last bytes of calls that have ended, and for clients that watch the health.
_CLOSE_GRACE_S = 0.5

Option = tuple[str, int]

_MAX_UNACCEPTED_S = 24 * 3600
UNREAD_REQUEST_BYTES = 16_384
"""Bytes of a request that wait in core until the server reads it. gRPC's default is 64 KiB."""
# Turns off core's own refusals: they happen before any of our code, without retry delay and without metrics. The first
# counts ended streams that are not freed yet, so it refuses clients within the limit.
_CORE_REFUSES_NOTHING: tuple[Option, ...] = (
    ("grpc.http.overload_protection", 0),
    # Core cancels calls that the event loop has not accepted after this time, 30 s by default.
    ("grpc.server_max_unrequested_time_in_server", _MAX_UNACCEPTED_S),
)
HANDSHAKE_OPTION: Option = ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000)
"""Time for TLS and the first bytes of HTTP/2: a silent client holds a descriptor. gRPC's default is two minutes."""
CLIENT_PING_OPTIONS: tuple[Option, ...] = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""A silent client may ping every 10 s, with and without calls; one that pings more often is disconnected.

gRPC's default of 5 minutes disconnects clients whose pings keep the entry of a NAT or find out that a server is gone.
"""
OTHER_PORT_CONNECTIONS = 64
"""Maximum number of connections to the probe port and to the admin port, which have a few clients each."""


def probe_options() -> list[Option]:
    """Return the options of the probe port, which is open to all: a few concurrent probes with a service's name."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", 1024),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.max_allowed_incoming_connections", OTHER_PORT_CONNECTIONS),
        HANDSHAKE_OPTION,
        *CLIENT_PING_OPTIONS,
    ]


def channel_options(settings: AccessSettings, *, shares_port: bool = False) -> list[Option]:
    """Return the gRPC options of the gRPC port. shares_port: other processes listen on it too."""
    num_unaccepted = max_unaccepted_calls(settings.max_concurrent_rpcs)
    limits: dict[str, float | None] = {
        "grpc.max_send_message_length": settings.max_response_bytes,
        "grpc.max_allowed_incoming_connections": settings.max_connections,
        "grpc.max_connection_age_ms": _in_ms(settings.max_connection_age_s),
        "grpc.max_connection_age_grace_ms": _in_ms(settings.max_connection_age_grace_s),
        "grpc.max_connection_idle_ms": _in_ms(settings.max_connection_idle_s),
    }
    return [
        ("grpc.so_reuseport", int(shares_port)),  # with it, two servers could share a port unnoticed
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        *_CORE_REFUSES_NOTHING,
        # A client may send this much of a request that the server has not begun to read, and no more: without probes of
        # the bandwidth core keeps to it. Then the window is that of the whole message.
        ("grpc.http2.lookahead_bytes", UNREAD_REQUEST_BYTES),
        ("grpc.http2.bdp_probe", 0),
        # A call that waits for the event loop takes 16 KB even after its client has reset it, and clients can make
        # 50,000 a second. Core cancels those beyond a limit; between two different limits it would choose at random.
        ("grpc.server.max_pending_requests", num_unaccepted),
        ("grpc.server.max_pending_requests_hard_limit", num_unaccepted),
        # Between these two limits gRPC refuses calls at random. Equal limits make the refusal deterministic.
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        # The timeout that gRPC really uses; without it, it is a minute regardless of the option above.
        ("grpc.http2.ping_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        HANDSHAKE_OPTION,
        *CLIENT_PING_OPTIONS,
        *((name, int(value)) for name, value in limits.items() if value is not None),
    ]


def max_unaccepted_calls(max_concurrent_rpcs: int) -> int:
    """Return the limit on the calls that wait for the event loop, which then refuses those beyond its own limit."""
    return max(4096, max_concurrent_rpcs + max_concurrent_rpcs // 2)


async def open_port(server: grpc.aio.Server, host: str, port: int, certificates: PortCertificates | None) -> int:
    """Start a server on a port and return the port. Raises PortError. certificates: None is plaintext."""
    try:
        if certificates is None:
            bound = server.add_insecure_port(address_of(host, port))
        else:
            bound = server.add_secure_port(address_of(host, port), certificates.credentials)
    except RuntimeError:  # another process took the port after check_port
        raise PortError(f"port {port} on {host} cannot be used") from None
    await server.start()
    if certificates is not None:
        certificates.follow(host, bound)
    return bound


async def close_port(server: grpc.aio.Server, certificates: PortCertificates | None, grace_s: float | None) -> None:
    """Stop a server. Running calls have grace_s to finish."""
    if certificates is not None:
        certificates.end_renewals()
    await server.stop(grace_s)
    if certificates is not None:
        await certificates.close()


@contextlib.asynccontextmanager
async def listening(
    server: grpc.aio.Server, host: str, port: int, certificates: PortCertificates | None
) -> AsyncIterator[int]:
    """Serve on a port until the context exits; yield the port. Raises PortError."""
    bound = await open_port(server, host, port, certificates)
    try:
        yield bound
    finally:
        await close_port(server, certificates, _CLOSE_GRACE_S)


@contextlib.asynccontextmanager
async def listening_to_the_end(
    server: grpc.aio.Server, host: str, port: int, certificates: PortCertificates | None
) -> AsyncIterator[int]:
    """Serve on a port until the process ends, even after the context exits; yield the port. Raises PortError.

    A gRPC server that stops answers CANCELLED to calls that it has not accepted yet, and to calls that arrive before
    its GOAWAY does (grpc/grpc#41785). That status means that the caller cancelled, and most balancers do not retry it.
    The end of the connection gives UNAVAILABLE instead. So only an exception stops the server.
    """
    bound = await open_port(server, host, port, certificates)
    try:
        yield bound
    except BaseException:
        await close_port(server, certificates, None)
        raise


def address_of(host: str, port: int) -> str:
    """Return host and port in the form of a gRPC target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000)
