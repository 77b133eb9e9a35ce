"""Ports of a server: their options, limits on connections, addresses and credentials; the line that names them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from antiphon.client import DEFAULT_TARGET
from antiphon.rpc.grpc_fixes.port_certificates import HANDSHAKE_TIMEOUT_S, PortCertificates
from antiphon.rpc.ports import PortError, check_port, serve_metrics
from antiphon.rpc.standard_services import HealthServicer
from antiphon.rpc.v1.models import LoadedModel
from antiphon.server.access import Access
from antiphon.server.settings import AccessSettings, ServerConfig
from antiphon.v1 import inference_pb2 as pb

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
    return [*_side_options(max_message_bytes=1024), ("grpc.max_concurrent_streams", 16)]


def admin_options() -> list[Option]:
    """Return the options of the admin port. Its largest messages are a name, a path and a few numbers."""
    return _side_options(max_message_bytes=65_536)


def _side_options(*, max_message_bytes: int) -> list[Option]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
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


def check_ports(config: ServerConfig) -> None:
    """Raise PortError if a port cannot be opened; not for /metrics, whose server says so itself."""
    for name in ("", "admin_", "probe_"):
        port = getattr(config, f"{name}port")
        if port is not None:
            check_port(getattr(config, f"{name}host"), port)


@contextlib.contextmanager
def metrics_port(config: ServerConfig, access: Access, registry: CollectorRegistry) -> Iterator[int]:
    """Serve a registry on the metrics port; yield the port. Raises PortError."""
    server = serve_metrics(config.metrics_host, config.metrics_port, registry, access.metrics_context)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextlib.asynccontextmanager
async def probe_port(config: ServerConfig, health_servicer: HealthServicer) -> AsyncIterator[int | None]:
    """Serve only health, in plaintext, if a probe port is configured; yield the port or None."""
    if config.probe_port is None:
        yield None
        return
    server = grpc.aio.server(options=probe_options())
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    async with listening(server, config.probe_host, config.probe_port, None) as port:
        yield port


def address_of(host: str, port: int) -> str:
    """Return host and port in the form of a gRPC target."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyModel:
    """Model that is served by another process: its name, the precision of its graphs, and what clients receive."""

    name: str
    precision: str
    description: pb.Model


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundPorts:
    """Ports that a server listens on; None for a port that is not configured."""

    port: int
    metrics: int
    admin: int | None
    probe: int | None


def ready_line(config: ServerConfig, models: Sequence[ReadyModel | LoadedModel], ports: BoundPorts) -> str:
    """Return the line. models: every model, the default first."""
    address = address_of(config.host, ports.port)
    scheme = "https" if config.metrics_tls else "http"
    admin = "" if ports.admin is None else f", admin on {address_of(config.admin_host, ports.admin)}"
    probe = "" if ports.probe is None else f", probes on {address_of(config.probe_host, ports.probe)}"
    return (
        f"antiphon: ready: {', '.join(f'{model.name} ({model.precision})' for model in models)} on {address}, "
        f"metrics on {scheme}://{address_of(config.metrics_host, ports.metrics)}/metrics{admin}{probe}; "
        f"next: antiphon {first_command(models[0].description, _client_flags(config, address))}"
    )


def _client_flags(config: ServerConfig, address: str) -> str:
    """Return the flags that a client needs for access, with placeholders for files."""
    flags = {
        f"--target {address} ": address != DEFAULT_TARGET,
        "--tls-ca CA ": config.tls_cert is not None,
        "--tls-cert CERT --tls-key KEY ": config.tls_client_ca is not None,
        "--token-file TOKEN ": config.auth_tokens_file is not None,
    }
    return "".join(flag for flag, is_needed in flags.items() if is_needed)


def first_command(model: pb.Model, target: str) -> str:
    """Return a first command for the user to try, which the default model supports."""
    text = "How are you?"
    if model.architecture != pb.ARCHITECTURE_ENCODER:
        return f'generate {target}"{text}"'
    tasks = {description.task for description in model.tasks}
    if pb.TASK_CLASSIFY in tasks:
        return f'classify {target}"{text}"'
    if pb.TASK_TAG in tasks:
        return f'tag {target}"{text}"'
    if pb.TASK_FILL_MASK in tasks and model.mask_token:
        return f'fill-mask {target}"How are {model.mask_token}?"'
    return f"models list {target}".rstrip()


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000)
