"""The process: loads bundles, opens the ports, drains on SIGTERM. `antiphon serve`.

Owns start-up, readiness and shutdown; what an RPC does is the servicer's, what a request does the engine's, which
models there are the control's. Health: "" and the service's name stand for the server, `<service>/<model>` for each
model: SERVING while it answers, NOT_SERVING from its unloading on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from antiphon.client import DEFAULT_TARGET
from antiphon.service.admin import AdminServicer, build_admin_server
from antiphon.service.config import ConfigError, ServerConfig, add_config_arguments, load_config, to_toml
from antiphon.service.control import Control
from antiphon.service.errors import OverBudget
from antiphon.service.handlers import SERVICE_NAME, Calls
from antiphon.service.loading import Shared, StartupError, load
from antiphon.service.memory import MemoryBudget
from antiphon.service.metric_families import MetricFamilies
from antiphon.service.models import Models, Served
from antiphon.service.pacing import Pacing
from antiphon.service.ports import PortError, check_port, serve_metrics
from antiphon.service.telemetry import Telemetry
from antiphon.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

EXIT_ENGINE_FAULT = 1
EXIT_USER_ERROR = 2

# For answers that are complete but not read yet: a client that reads nothing must not keep the process alive.
_FLUSH_GRACE_S = 5.0
# For the last bytes of calls that have ended, and for clients that watch the health.
_CLOSE_GRACE_S = 0.5
_ENGINE_CHECK_S = 1.0
# How long the event loop may keep the interpreter from the engine's thread. The default, 5 ms, is several steps.
_SWITCH_INTERVAL_S = 0.001
# A client may ping this often; gRPC's own default of 5 minutes drops clients behind a short-lived NAT.
_MIN_CLIENT_PING_MS = 10_000
_SERVICES = ("", SERVICE_NAME)
_SERVING = health_pb2.HealthCheckResponse.SERVING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon serve`."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop. Returns 0 once drained, 2 for a wrong setting, bundle or port, 1 for a lost engine."""
    try:
        config = load_config(arguments)
        if arguments.print_config:
            sys.stdout.write(to_toml(config))
            return 0
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        check_port(config.host, config.port)
        if config.admin_port is not None:
            check_port(config.admin_host, config.admin_port)
        registry = CollectorRegistry()
        with _metrics_port(config, registry) as metrics_port:
            shared = _shared(config, registry)
            served = [load(plan, shared) for plan in config.plans]
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            return uvloop.run(_serve(config, served, shared, metrics_port))
    except (ConfigError, StartupError, OverBudget, PortError) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _shared(config: ServerConfig, registry: CollectorRegistry) -> Shared:
    families = MetricFamilies(registry)
    if config.memory_limit_bytes is not None:
        families.set_budget(config.memory_limit_bytes)
    return Shared(
        families=families,
        pacing=Pacing(config.max_stream_messages_per_s),
        budget=MemoryBudget(config.memory_limit_bytes),
    )


@contextlib.contextmanager
def _metrics_port(config: ServerConfig, registry: CollectorRegistry) -> Iterator[int]:
    server = serve_metrics(config.metrics_host, config.metrics_port, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


async def _serve(config: ServerConfig, served: Sequence[Served], shared: Shared, metrics_port: int) -> int:
    stop = _stop_on_signals()
    health_servicer = health.aio.HealthServicer()

    async def announce(name: str, status: int) -> None:
        await health_servicer.set(f"{SERVICE_NAME}/{name}", status)

    control = Control(Models(), shared, announce)
    telemetry = Telemetry(shared.families)
    calls = Calls(control.models, telemetry)
    server = build_server(config, calls, health_servicer)
    port = _bind(server, config.host, config.port)
    for one in served:
        await control.publish(one)
    for name in _SERVICES:
        await health_servicer.set(name, _SERVING)
    await server.start()
    async with _admin(config, control, shared, telemetry) as admin_port:
        print(_ready_line(config, served, port, metrics_port, admin_port), flush=True)
        has_faulted = await _until_stopped(stop, control)
        await health_servicer.enter_graceful_shutdown()
        await _drain(config, control, calls)
    await server.stop(_CLOSE_GRACE_S)
    return EXIT_ENGINE_FAULT if has_faulted else 0


@contextlib.asynccontextmanager
async def _admin(
    config: ServerConfig, control: Control, shared: Shared, telemetry: Telemetry
) -> AsyncIterator[int | None]:
    """Serve the admin service where a port is set; its port."""
    if config.admin_port is None:
        yield None
        return
    server = build_admin_server(AdminServicer(control, shared.budget, config), telemetry)
    port = _bind(server, config.admin_host, config.admin_port)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_CLOSE_GRACE_S)


def build_server(config: ServerConfig, calls: Calls, health_servicer: health.aio.HealthServicer) -> grpc.aio.Server:
    """A gRPC server with the calls, health and reflection, bound to no port yet."""
    server = grpc.aio.server(options=_channel_options(config))
    server.add_generic_rpc_handlers((calls.generic_handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # on, two servers would share a port in silence
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_CLIENT_PING_MS),
    ]


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return server.add_insecure_port(_address(host, port))
    except RuntimeError:  # taken since check_port looked
        raise PortError(f"port {port} on {host} cannot be used") from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ready_line(
    config: ServerConfig, served: Sequence[Served], port: int, metrics_port: int, admin_port: int | None
) -> str:
    address = _address(config.host, port)
    target = "" if address == DEFAULT_TARGET else f"--target {address} "
    admin = "" if admin_port is None else f", admin on {_address(config.admin_host, admin_port)}"
    return (
        f"antiphon: ready: {', '.join(f'{one.name} ({one.precision})' for one in served)} on {address}, "
        f"metrics on http://{_address(config.metrics_host, metrics_port)}/metrics{admin}; "
        f"next: antiphon {first_command(served[0].description, target)}"
    )


def first_command(model: pb.Model, target: str) -> str:
    """What to type first, of what the default model can do."""
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


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; a second one ends the process there and then."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("%s: draining; once more to leave at once", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


async def _until_stopped(stop: asyncio.Event, control: Control) -> bool:
    """Wait for a signal; True where an engine's thread ended first."""
    while not control.has_lost_engine:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _ENGINE_CHECK_S)
            return False
    log.critical("an engine is gone; leaving, so that whoever watches this process starts another")
    return True


async def _drain(config: ServerConfig, control: Control, calls: Calls) -> None:
    """Finish what runs, refuse what comes; the port stays open so that the refusal can be heard."""
    has_finished = await control.drain(config.drain_grace_s)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(calls.wait_until_idle(), _FLUSH_GRACE_S)
    log.info("drained" if has_finished else "drained; requests still running after %s s were ended")
