"""Server process of `antiphon serve`: opens the ports, loads bundles and serves.

Owns start-up and the ports. `lifecycle.py` owns the shutdown, `probes.py` the health, the servicers the RPCs, the
engine the requests, and `control.py` the set of models.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from antiphon.client import DEFAULT_TARGET
from antiphon.service.domain.errors import OverBudget
from antiphon.service.engine.interpreter import interpreter_for_steps
from antiphon.service.observability.logs.formats import configure_logging
from antiphon.service.observability.logs.log_handler import is_log_behind
from antiphon.service.observability.metrics.metric_families import MetricFamilies
from antiphon.service.observability.metrics.process_metrics import add_process_metrics
from antiphon.service.observability.telemetry import Telemetry
from antiphon.service.rpc.calls.background import in_background, is_anything_left, running_in_background
from antiphon.service.rpc.calls.batches import free_failed_batches
from antiphon.service.rpc.calls.connections.ports import PortError, check_port, serve_metrics
from antiphon.service.rpc.calls.connections.resets import Resets
from antiphon.service.rpc.calls.probes import Health, Probes
from antiphon.service.rpc.calls.rpc import CallLimits
from antiphon.service.rpc.calls.standard_services import UnknownMethods, standard_handlers
from antiphon.service.rpc.calls.waits.client_wait_metrics import WaitMetrics
from antiphon.service.rpc.calls.waits.client_waits import ClientWaits, WaitLimits
from antiphon.service.rpc.oip import servicer as oip
from antiphon.service.rpc.oip.servicer import OpenInferenceServicer
from antiphon.service.rpc.security.file_metrics import FileMetrics
from antiphon.service.rpc.security.reload import FileProblem
from antiphon.service.rpc.v1.answers.pacing import Pacing
from antiphon.service.rpc.v1.handlers import SERVICE_NAME, Calls
from antiphon.service.rpc.v1.models import Models, Served
from antiphon.service.rpc.v1.requests.long_texts import LongTexts
from antiphon.service.server.access import Access
from antiphon.service.server.admin import AdminServicer, build_admin_server
from antiphon.service.server.connection_watch import ConnectionWatch, num_open_files
from antiphon.service.server.free_memory import FreeMemory
from antiphon.service.server.lifecycle import EXIT_USER_ERROR, Grace, Running, Stop, end_now
from antiphon.service.server.listener import (
    OTHER_PORT_CONNECTIONS,
    PROBE_OPTIONS,
    address_of,
    channel_options,
    listening,
    listening_to_the_end,
)
from antiphon.service.server.load_report import SERVICE_NAME as LOAD_SERVICE_NAME
from antiphon.service.server.load_report import LoadReports, LoadServicer
from antiphon.service.server.models.control import Control
from antiphon.service.server.models.loading import Shared, StartupError, load
from antiphon.service.server.models.machine import ResidentMemory, allow_files, memory_bytes
from antiphon.service.server.models.memory import MemoryBudget
from antiphon.service.server.observation import check_tracing, observing
from antiphon.service.server.settings import ConfigError, ServerConfig, add_config_arguments, load_config, to_toml
from antiphon.service.server.watchdog import LoopLag, Watchdog
from antiphon.v1 import inference_pb2 as pb

# Memory for incomplete requests of the largest size, and the smallest limit on their number.
_MAX_INCOMPLETE_BYTES = 256 << 20
_MIN_INCOMPLETE_REQUESTS = 16
SERVICES = (SERVICE_NAME, oip.SERVICE_NAME)
"""Services whose readiness the health service reports, in addition to the server's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon serve`."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until asked to stop, then end the process: with 0 once drained, 1 for an engine that is lost or hangs.

    Returns 2 for a wrong setting, bundle or port.
    """
    try:
        config = load_config(arguments)
        if arguments.print_config:
            sys.stdout.write(to_toml(config))
            return 0
        handler = configure_logging(config.log_level, config.log_format)
        check_tracing(config)
        _check_ports(config)
        config = _within_files(config)
        registry = CollectorRegistry()
        shared = _shared(config, registry)
        handler.report_drops(shared.families.log_lines_dropped.inc)
        access = Access(config, FileMetrics(shared.families))
        access.warn()
        with _metrics_port(config, access, registry) as metrics_port, interpreter_for_steps():
            uvloop.run(_serve(config, access, shared, metrics_port))
    except (ConfigError, StartupError, OverBudget, PortError, FileProblem) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
    # These cannot be interrupted: a model being loaded, an engine that hangs, a log line that is not read.
    if is_anything_left() or is_log_behind():
        end_now(EXIT_USER_ERROR)
    return EXIT_USER_ERROR


def _within_files(config: ServerConfig) -> ServerConfig:
    """Raise the limit of open files, and limit the gRPC port's connections to the number that fits.

    Without free descriptors nothing works, including /metrics and the files of certificates and tokens.
    """
    num_requests = sum(plan.limits.max_accepted_requests for plan in config.plans)
    num_ports = (config.admin_port is not None) + (config.probe_port is not None)
    room = allow_files(max(num_requests, config.max_connections or 0), num_ports * OTHER_PORT_CONNECTIONS)
    limits = [limit for limit in (config.max_connections, room) if limit is not None]
    return config.model_copy(update={"max_connections": min(limits, default=None)})


def _check_ports(config: ServerConfig) -> None:
    for name in ("", "admin_", "probe_"):
        port = getattr(config, f"{name}port")
        if port is not None:
            check_port(getattr(config, f"{name}host"), port)


def _shared(config: ServerConfig, registry: CollectorRegistry) -> Shared:
    families = MetricFamilies(registry)
    add_process_metrics(registry)
    if config.memory_limit_bytes is not None:
        families.set_budget(config.memory_limit_bytes)
    if (machine_bytes := memory_bytes()) is not None:
        families.set_machine(machine_bytes)
    waits = build_waits(config, families)
    return Shared(
        families=families,
        pacing=Pacing(config.max_stream_messages_per_s, waits),
        # One caller may have half of it, which is enough for all texts of one message.
        long_texts=LongTexts(2 * max(config.max_message_bytes, config.max_text_bytes)),
        budget=MemoryBudget(config.memory_limit_bytes),
        machine_bytes=machine_bytes,
    )


@contextlib.contextmanager
def _metrics_port(config: ServerConfig, access: Access, registry: CollectorRegistry) -> Iterator[int]:
    server = serve_metrics(config.metrics_host, config.metrics_port, registry, access.metrics_context)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


async def _serve(config: ServerConfig, access: Access, shared: Shared, metrics_port: int) -> NoReturn:
    """Serve, then end the process."""
    async with observing(config, shared.families) as telemetry:
        # Keeps a reference, because a server without one stops. It refuses calls until the process ends.
        code, _server = await _serve_calls(config, access, shared, telemetry, metrics_port)
    end_now(code)


async def _serve_calls(
    config: ServerConfig, access: Access, shared: Shared, telemetry: Telemetry, metrics_port: int
) -> tuple[int, grpc.aio.Server]:
    """Serve. Return the exit code and the server, whose port is still open."""
    stop = Stop()
    stop.on_signals()
    health_servicer = health.aio.HealthServicer()
    probes = Probes(health_servicer, SERVICES)
    await probes.start()
    control = Control(Models(), shared, probes.announce)
    calls = Calls(
        control.models,
        telemetry,
        shared.pacing,
        call_limits(config),
        Resets(shared.families.connections_closed.inc),
    )
    server = build_server(
        config, calls, health_servicer, shared.pacing, access.interceptors(telemetry, shared.pacing.waits)
    )
    # The port opens first: early clients receive a status that tells them to retry, which a closed port could not send.
    async with (
        _probe_port(config, health_servicer) as probe_port,
        listening_to_the_end(server, config.host, config.port, access.port_certificates()) as port,
    ):
        served = await stop.unless_asked(in_background(lambda: [load(plan, shared) for plan in config.plans], "load"))
        if served is None:
            return 0, server
        for one in served:
            await control.publish(one)
        await probes.ready()
        async with _admin(config, access, control, shared, telemetry) as admin_port:
            ports = _Ports(port=port, metrics=metrics_port, admin=admin_port, probe=probe_port)
            running = Running(control=control, calls=calls, probes=probes)
            grace = Grace(delay_s=config.drain_delay_s, drain_s=config.drain_grace_s)
            async with _monitored(config, control, probes, shared):
                # The last step of a start: a client that reads this line finds all metrics at once.
                print(_ready_line(config, served, ports), flush=True)
                return await running.until_stopped(stop, grace), server


@contextlib.asynccontextmanager
async def _probe_port(config: ServerConfig, health_servicer: health.aio.HealthServicer) -> AsyncIterator[int | None]:
    """Serve only health, in plaintext, if a probe port is configured; yield the port or None."""
    if config.probe_port is None:
        yield None
        return
    server = grpc.aio.server(options=PROBE_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    async with listening(server, config.probe_host, config.probe_port, None) as port:
        yield port


@contextlib.asynccontextmanager
async def _monitored(config: ServerConfig, control: Control, probes: Probes, shared: Shared) -> AsyncIterator[None]:
    """Watch for hung engines, delays of the event loop and too many connections, and return free memory."""
    lag, watchdog = LoopLag(time.monotonic), Watchdog(control.models, probes, config.watchdog_timeout_s)
    connections = ConnectionWatch(config.max_connections, num_open_files)
    shared.families.watch_loop(lambda: lag.lag_s)
    freeing = FreeMemory(ResidentMemory().num_bytes)
    shared.families.watch_connections(lambda: connections.is_full)
    async with running_in_background(watchdog.run(), lag.run(), connections.run(), freeing.run()):
        yield


@contextlib.asynccontextmanager
async def _admin(
    config: ServerConfig, access: Access, control: Control, shared: Shared, telemetry: Telemetry
) -> AsyncIterator[int | None]:
    """Serve the admin service if its port is configured; yield the port or None."""
    if config.admin_port is None:
        yield None
        return
    servicer = AdminServicer(control, shared.budget, config)
    interceptors = access.admin_interceptors(telemetry, shared.pacing.waits)
    server = build_admin_server(servicer, telemetry, shared.pacing.waits, interceptors)
    async with listening(server, config.admin_host, config.admin_port, access.port_certificates()) as port:
        yield port


def build_waits(config: ServerConfig, families: MetricFamilies) -> ClientWaits:
    """Return the limits of calls that wait for their clients, with their metrics."""
    metrics = WaitMetrics(families)
    limits = WaitLimits(
        request_timeout_s=config.request_timeout_s,
        answer_timeout_s=config.slow_reader_timeout_s,
        max_requests=max(_MIN_INCOMPLETE_REQUESTS, _MAX_INCOMPLETE_BYTES // config.max_message_bytes),
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
    calls: Calls,
    health_servicer: health.aio.HealthServicer,
    pacing: Pacing,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a gRPC server with the calls, health and reflection, not yet bound to a port."""
    free_failed_batches()
    # Data of channelz is collected only if there is an admin port, which serves it.
    options = [*channel_options(config), ("grpc.enable_channelz", int(config.admin_port is not None))]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    in_flight = calls.in_flight
    open_inference = OpenInferenceServicer(calls.models, in_flight, Health(health_servicer), pacing)
    server.add_generic_rpc_handlers((calls.generic_handler(), open_inference.generic_handler()))
    names = [*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
    if config.load_reports == "on":
        reports = LoadReports(calls.models)
        in_flight.end_with(reports.trailer)
        server.add_generic_rpc_handlers((LoadServicer(reports, config.load_report_interval_s).handler(in_flight),))
        names.append(LOAD_SERVICE_NAME)
    apart = in_flight.apart(is_logged=False)
    reflecting = reflection.aio.ReflectionServicer(names)
    for add in (
        partial(health_pb2_grpc.add_HealthServicer_to_server, health_servicer),
        partial(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, reflecting),
    ):
        server.add_generic_rpc_handlers(standard_handlers(add, apart))
    server.add_generic_rpc_handlers((UnknownMethods(in_flight.apart()),))
    return server


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ports:
    """Ports that a server listens on; None for a port that is not configured."""

    port: int
    metrics: int
    admin: int | None
    probe: int | None


def _ready_line(config: ServerConfig, served: Sequence[Served], ports: _Ports) -> str:
    address = address_of(config.host, ports.port)
    scheme = "https" if config.metrics_tls else "http"
    admin = "" if ports.admin is None else f", admin on {address_of(config.admin_host, ports.admin)}"
    probe = "" if ports.probe is None else f", probes on {address_of(config.probe_host, ports.probe)}"
    return (
        f"antiphon: ready: {', '.join(f'{one.name} ({one.precision})' for one in served)} on {address}, "
        f"metrics on {scheme}://{address_of(config.metrics_host, ports.metrics)}/metrics{admin}{probe}; "
        f"next: antiphon {first_command(served[0].description, _client_flags(config, address))}"
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
