"""Ports beside the gRPC port: metrics, probes, and the admin service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.client_waits import ClientWaits
from antiphon.rpc.ports import check_port, serve_metrics
from antiphon.rpc.standard_services import HealthServicer
from antiphon.server.access import Access
from antiphon.server.admin import Admin, build_admin_server
from antiphon.server.listener import listening, probe_options
from antiphon.server.settings import ServerConfig


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


@contextlib.asynccontextmanager
async def admin_port(
    config: ServerConfig, access: Access, servicer: Admin, telemetry: Telemetry, waits: ClientWaits
) -> AsyncIterator[int | None]:
    """Serve the admin service if its port is configured; yield the port or None."""
    if config.admin_port is None:
        yield None
        return
    server = build_admin_server(servicer, telemetry, waits, access.admin_interceptors(telemetry, waits))
    async with listening(server, config.admin_host, config.admin_port, access.port_certificates()) as port:
        yield port
