"""gRPC server of the service port: its services, limits on calls and options."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.client_waits import ClientWaits, WaitLimits, WaitMetrics
from antiphon.rpc.grpc_fixes.batches import free_failed_batches
from antiphon.rpc.middleware import CallLimits
from antiphon.rpc.oip import servicer as oip
from antiphon.rpc.oip.servicer import OpenInferenceServicer
from antiphon.rpc.standard_services import HealthServicer, UnknownMethods, standard_handlers
from antiphon.rpc.v1.handlers import SERVICE_NAME, Handlers
from antiphon.server.load_report import SERVICE_NAME as LOAD_SERVICE_NAME
from antiphon.server.load_report import LoadReports, LoadServicer
from antiphon.server.ports import channel_options
from antiphon.server.settings import ServerConfig

# Memory for incomplete requests of the largest size, and the smallest limit on their number.
MAX_INCOMPLETE_BYTES = 64 << 20
_MIN_INCOMPLETE_REQUESTS = 16
SERVICES = (SERVICE_NAME, oip.SERVICE_NAME)
"""Services whose readiness the health service reports, in addition to the server's own."""


def build_waits(config: ServerConfig, families: MetricFamilies) -> ClientWaits:
    """Return the limits of calls that wait for their clients, with their metrics."""
    metrics = WaitMetrics(families)
    limits = WaitLimits(
        request_timeout_s=config.request_timeout_s,
        answer_timeout_s=config.slow_reader_timeout_s,
        max_requests=max(_MIN_INCOMPLETE_REQUESTS, MAX_INCOMPLETE_BYTES // config.max_message_bytes),
        max_unsent_bytes=config.max_unsent_bytes,
    )
    waits = ClientWaits(limits, metrics.given_up)
    metrics.watch(waits)
    return waits


def call_limits(config: ServerConfig) -> CallLimits:
    """Return the limits on the calls of the gRPC port."""
    return CallLimits(max_rpcs=config.max_concurrent_rpcs, max_metadata_bytes=config.max_metadata_bytes)


def build_server(
    config: ServerConfig,
    calls: Handlers,
    health_servicer: HealthServicer,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    *,
    shares_port: bool = False,
) -> grpc.aio.Server:
    """Return a gRPC server with the calls, health and reflection, not yet bound to a port."""
    free_failed_batches()
    # Data of channelz is collected only if there is an admin port, which serves it.
    options = [
        *channel_options(config, shares_port=shares_port),
        ("grpc.enable_channelz", int(config.admin_port is not None)),
    ]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    middleware = calls.middleware
    open_inference = OpenInferenceServicer(calls.models, middleware, health_servicer)
    server.add_generic_rpc_handlers((calls.generic_handler(), open_inference.generic_handler()))
    names = [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
    if config.load_reports == "on":
        reports = LoadReports(calls.models)
        middleware.end_with(reports.trailer)
        server.add_generic_rpc_handlers((LoadServicer(reports, config.load_report_interval_s).handler(middleware),))
        names.append(LOAD_SERVICE_NAME)
    apart = middleware.apart(is_logged=False)
    reflecting = reflection.aio.ReflectionServicer(names)
    for add in (
        partial(health_pb2_grpc.add_HealthServicer_to_server, health_servicer),
        partial(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, reflecting),
    ):
        server.add_generic_rpc_handlers(standard_handlers(add, apart))
    server.add_generic_rpc_handlers((UnknownMethods(middleware.apart()),))
    return server
