"""Application of a server process: what its models share, the service that answers calls, and telemetry.

Opens no port: a server of one process and each worker open their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from antiphon.observability.access_log import AccessLog
from antiphon.observability.call import Sampler
from antiphon.observability.metrics import MetricFamilies, add_process_metrics
from antiphon.observability.telemetry import Telemetry
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.rpc.background import in_background
from antiphon.rpc.client_waits import ClientWaits, WaitLimits, WaitMetrics
from antiphon.rpc.grpc_fixes.batches import free_failed_batches
from antiphon.rpc.grpc_fixes.resets import Resets
from antiphon.rpc.middleware import CallLimits, CallMiddleware
from antiphon.rpc.oip import servicer as oip
from antiphon.rpc.oip.servicer import OpenInferenceServicer
from antiphon.rpc.standard_services import HealthServicer, Probes, UnknownMethods, standard_handlers
from antiphon.rpc.v1.handlers import SERVICE_NAME, Handlers
from antiphon.rpc.v1.inputs import LongTexts
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.cuda.open_device import DeviceError, open_device
from antiphon.server.access import Access
from antiphon.server.lifecycle import Grace, Stop, until_stopped
from antiphon.server.load_report import SERVICE_NAME as LOAD_SERVICE_NAME
from antiphon.server.load_report import LoadReports, LoadServicer
from antiphon.server.machine import allow_files, memory_bytes
from antiphon.server.models.control import Control
from antiphon.server.models.loading import SharedResources, StartupError, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.ports import OTHER_PORT_CONNECTIONS, channel_options
from antiphon.server.settings import ConfigError, ServerConfig
from antiphon.server.watch import watching

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


if TYPE_CHECKING:
    from antiphon.observability.tracing import Spans

# Time for a slow reader of the log, or a slow collector, at shutdown.
_FLUSH_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class App:
    """Application of one process: health, models and calls."""

    config: ServerConfig
    resources: SharedResources
    health: HealthServicer
    probes: Probes
    control: Control
    calls: Handlers
    waits: ClientWaits
    server: grpc.aio.Server
    """Server of the service port, not yet bound to it."""

    @classmethod
    async def build(
        cls,
        config: ServerConfig,
        access: Access,
        resources: SharedResources,
        telemetry: Telemetry,
        *,
        worker_label: str | None = None,
    ) -> Self:
        """Build the application. The health service reports a process that is alive and not ready.

        worker_label: index of this process and number of processes that share the port, such as 0/2; None for a single
        process.
        """
        servicer = HealthServicer()
        probes = Probes(servicer, SERVICES)
        await probes.start()
        control = Control(Models(), resources, probes.announce)
        resets = Resets(resources.families.connections_closed.inc)
        waits = build_waits(config, resources.families)
        middleware = CallMiddleware(telemetry, waits, call_limits(config), resets)
        calls = Handlers(control.models, middleware, resources.pacing, worker_label)
        interceptors = access.interceptors(telemetry, waits)
        server = build_server(config, calls, servicer, interceptors, shares_port=worker_label is not None)
        return cls(
            config=config,
            resources=resources,
            health=servicer,
            probes=probes,
            control=control,
            calls=calls,
            waits=waits,
            server=server,
        )

    async def load(self, stop: Stop) -> list[LoadedModel] | None:
        """Load and serve every configured model. Returns None as soon as the process is asked to stop.

        Raises StartupError or OverBudget.
        """
        config, resources = self.config, self.resources
        loading = in_background(lambda: [load(plan, resources) for plan in config.plans], "load")
        models = await stop.unless_asked(loading)
        for served in models or ():
            await self.control.publish(served)
        return models

    def watching(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Watch for hung engines, delays of the event loop and too many connections, and return free memory."""
        return watching(
            self.control.models,
            self.probes,
            self.resources.families,
            timeout_s=self.config.watchdog_timeout_s,
            max_connections=self.config.max_connections,
        )

    async def until_stopped(self, stop: Stop) -> int:
        """Serve until asked to stop or an engine is lost, then drain with open ports. Return the exit code."""
        grace = Grace(delay_s=self.config.drain_delay_s, drain_s=self.config.drain_grace_s)
        return await until_stopped(stop, grace, self.control, self.calls, self.probes)


def within_files(config: ServerConfig) -> ServerConfig:
    """Raise the limit of open files, and limit the gRPC port's connections to the number that fits.

    Without free descriptors nothing works, including /metrics and the files of certificates and tokens.
    """
    num_requests = sum(plan.limits.max_accepted_requests for plan in config.plans)
    num_ports = (config.admin_port is not None) + (config.probe_port is not None)
    room = allow_files(max(num_requests, config.max_connections or 0), num_ports * OTHER_PORT_CONNECTIONS)
    limits = [limit for limit in (config.max_connections, room) if limit is not None]
    return config.model_copy(update={"max_connections": min(limits, default=None)})


def shared_resources(config: ServerConfig, registry: CollectorRegistry, *, num_workers: int = 1) -> SharedResources:
    """Return what the models of this process share, with metrics in a registry.

    num_workers: processes like this one, which all need their own caches and workspaces. Raises StartupError.
    """
    families = MetricFamilies(registry)
    add_process_metrics(registry)
    if config.memory_limit_bytes is not None:
        families.set_budget(config.memory_limit_bytes)
    if (machine_bytes := memory_bytes()) is not None:
        families.set_machine(machine_bytes)
    return SharedResources(
        families=families,
        pacing=Pacing(config.max_stream_messages_per_s / num_workers),
        # One caller may have half of it, which is enough for all texts of one message.
        long_texts=LongTexts(2 * max(config.max_message_bytes, config.max_text_bytes)),
        budget=MemoryBudget(config.memory_limit_bytes),
        machine_bytes=machine_bytes,
        num_workers=num_workers,
        device=_device(config),
        needs_device=config.device == "cuda",
    )


def _device(config: ServerConfig) -> CudaDevice | None:
    """Open the GPU that the settings choose. Raises StartupError if there must be one and it cannot be used."""
    try:
        return open_device(config.device)
    except DeviceError as error:
        raise StartupError(f"device is cuda: {error}") from error


def check_tracing(config: ServerConfig) -> None:
    """Raise ConfigError if spans are configured and the packages that send them are not installed."""
    if config.otlp_endpoint is None:
        return
    try:
        import antiphon.observability.tracing  # noqa: F401 - checks that it and its imports are installed
    except ImportError as error:
        missing = f"otlp_endpoint is {config.otlp_endpoint!r}, and {error.name} is not installed"
        raise ConfigError(f"{missing}: pip install 'antiphon[trace]'") from None


@contextlib.asynccontextmanager
async def observing(config: ServerConfig, families: MetricFamilies) -> AsyncIterator[Telemetry]:
    """Yield the telemetry of a server. On exit, write and send what is pending, within seconds."""
    sinks: list[AccessLog | Spans] = []
    sampler = None
    if config.access_log != "none":
        sinks.append(AccessLog(families, is_for_all=config.access_log == "all"))
    if config.otlp_endpoint is not None:
        # Without the setting, opentelemetry is never imported.
        from antiphon.observability.tracing import open_spans

        sinks.append(open_spans(config.otlp_endpoint, families))
        sampler = Sampler(config.trace_sample_ratio)
    try:
        yield Telemetry(families, *sinks, sampler=sampler)
    finally:
        await asyncio.gather(*(asyncio.to_thread(sink.close, _FLUSH_S) for sink in sinks))
