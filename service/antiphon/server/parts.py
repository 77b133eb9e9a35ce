"""Parts of a server process that answers calls: health, models, RPCs, and what watches over them.

Opens no port: `process.py` does for a server of one process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.observability.metrics.process_metrics import add_process_metrics
from antiphon.observability.telemetry import Telemetry
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.rpc.background import in_background, running_in_background
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
from antiphon.server.connection_watch import ConnectionWatch, num_open_files
from antiphon.server.free_memory import FreeMemory
from antiphon.server.lifecycle import Grace, Running, Stop
from antiphon.server.listener import OTHER_PORT_CONNECTIONS, channel_options
from antiphon.server.load_report import SERVICE_NAME as LOAD_SERVICE_NAME
from antiphon.server.load_report import LoadReports, LoadServicer
from antiphon.server.models.control import Control
from antiphon.server.models.loading import Shared, StartupError, load
from antiphon.server.models.machine import ResidentMemory, allow_files, memory_bytes
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from antiphon.server.watchdog import LoopLag, Watchdog

# Memory for incomplete requests of the largest size, and the smallest limit on their number.
MAX_INCOMPLETE_BYTES = 64 << 20
_MIN_INCOMPLETE_REQUESTS = 16
SERVICES = (SERVICE_NAME, oip.SERVICE_NAME)
"""Services whose readiness the health service reports, in addition to the server's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts of one process. server: not yet bound to a port."""

    config: ServerConfig
    shared: Shared
    health: HealthServicer
    probes: Probes
    control: Control
    calls: Handlers
    waits: ClientWaits
    server: grpc.aio.Server

    @classmethod
    async def assemble(
        cls,
        config: ServerConfig,
        access: Access,
        shared: Shared,
        telemetry: Telemetry,
        *,
        place: str | None = None,
    ) -> Self:
        """Build the parts. The health service reports a process that is alive and not ready.

        place: index of this process and number of processes that share the port, such as 0/2; None if it is alone.
        """
        servicer = HealthServicer()
        probes = Probes(servicer, SERVICES)
        await probes.start()
        control = Control(Models(), shared, probes.announce)
        resets = Resets(shared.families.connections_closed.inc)
        waits = build_waits(config, shared.families)
        middleware = CallMiddleware(telemetry, waits, call_limits(config), resets)
        calls = Handlers(control.models, middleware, shared.pacing, place)
        interceptors = access.interceptors(telemetry, waits)
        server = build_server(config, calls, servicer, interceptors, shares_port=place is not None)
        return cls(
            config=config,
            shared=shared,
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
        config, shared = self.config, self.shared
        served = await stop.unless_asked(in_background(lambda: [load(plan, shared) for plan in config.plans], "load"))
        for one in served or ():
            await self.control.publish(one)
        return served

    @contextlib.asynccontextmanager
    async def monitored(self) -> AsyncIterator[None]:
        """Watch for hung engines, delays of the event loop and too many connections, and return free memory."""
        families = self.shared.families
        lag = LoopLag(time.monotonic)
        watchdog = Watchdog(self.control.models, self.probes, self.config.watchdog_timeout_s)
        connections = ConnectionWatch(self.config.max_connections, num_open_files)
        families.watch_loop(lambda: lag.lag_s)
        models = self.control.models
        freeing = FreeMemory(ResidentMemory().num_bytes, engines=lambda: [served.engine for served in models])
        families.watch_connections(lambda: connections.is_full)
        async with running_in_background(watchdog.run(), lag.run(), connections.run(), freeing.run()):
            yield

    async def until_stopped(self, stop: Stop) -> int:
        """Serve until asked to stop or an engine is lost, then drain with open ports. Return the exit code."""
        running = Running(control=self.control, calls=self.calls, probes=self.probes)
        grace = Grace(delay_s=self.config.drain_delay_s, drain_s=self.config.drain_grace_s)
        return await running.until_stopped(stop, grace)


def within_files(config: ServerConfig) -> ServerConfig:
    """Raise the limit of open files, and limit the gRPC port's connections to the number that fits.

    Without free descriptors nothing works, including /metrics and the files of certificates and tokens.
    """
    num_requests = sum(plan.limits.max_accepted_requests for plan in config.plans)
    num_ports = (config.admin_port is not None) + (config.probe_port is not None)
    room = allow_files(max(num_requests, config.max_connections or 0), num_ports * OTHER_PORT_CONNECTIONS)
    limits = [limit for limit in (config.max_connections, room) if limit is not None]
    return config.model_copy(update={"max_connections": min(limits, default=None)})


def shared_parts(config: ServerConfig, registry: CollectorRegistry, *, num_workers: int = 1) -> Shared:
    """Return what the models of this process share, with metrics in a registry.

    num_workers: processes like this one, which all need their own caches and workspaces. Raises StartupError.
    """
    families = MetricFamilies(registry)
    add_process_metrics(registry)
    if config.memory_limit_bytes is not None:
        families.set_budget(config.memory_limit_bytes)
    if (machine_bytes := memory_bytes()) is not None:
        families.set_machine(machine_bytes)
    return Shared(
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
