"""Supervisor process of `antiphon serve --workers`: owns the ports beside the gRPC port, and the workers.

The workers listen on the gRPC port themselves: the kernel gives each connection to one of them (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

import uvloop
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry, Metric

from antiphon.observability.logging import BackgroundHandler
from antiphon.observability.metrics import MetricFamilies, add_process_metrics
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.background import running_in_background
from antiphon.rpc.ports import PortError
from antiphon.rpc.reloading import FileMetrics
from antiphon.rpc.standard_services import HealthServicer, Probes
from antiphon.server.access import Access
from antiphon.server.admin import admin_port
from antiphon.server.app import SERVICES, build_waits, observing
from antiphon.server.lifecycle import Stop, end_now
from antiphon.server.machine import proportional_bytes
from antiphon.server.ports import BoundPorts, ReadyModel, metrics_port, probe_port, ready_line
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.admin import WorkersAdmin
from antiphon.server.workers.division import Division
from antiphon.server.workers.merged_metrics import MergedCollector, Totals, exposition_of
from antiphon.server.workers.supervisor import Supervisor, WorkerFailed, WorkerProcess

# Time for the metrics of one worker, whose event loop may be busy. A scrape has ten seconds.
_METRICS_TIMEOUT_S = 5.0
_SUPERVISOR = "supervisor"
RESIDENT_FAMILY = "process_resident_memory_bytes"


def run_workers(config: ServerConfig, divisions: Sequence[Division], handler: BackgroundHandler) -> int:
    """Serve until asked to stop, then end the process with the largest exit code of the workers.

    handler: of this process's log. Returns the exit code of a worker that could not start. Raises PortError or
    FileProblem.
    """
    registry = CollectorRegistry()
    families = MetricFamilies(registry)
    add_process_metrics(registry)
    handler.report_drops(families.log_lines_dropped.inc)
    access = Access(config, FileMetrics(families))
    access.warn()
    try:
        with _reserved(config.host, config.port) as port:
            shared = config.model_copy(update={"port": port})
            uvloop.run(_Server(shared, divisions, access, families, registry).serve())
    except WorkerFailed as error:
        return error.code if error.code > 0 else 1
    return 0


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Hold a port that sockets of this user's other processes may listen on; yield its number. Raises PortError."""
    with contextlib.ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            reserved = stack.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
        except OSError as error:
            raise PortError(f"port {port} on {host} cannot be used: {error.strerror or error}") from None
        yield reserved.getsockname()[1]


class _Server:
    """A supervisor with its ports. Create it outside, use it inside the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        divisions: Sequence[Division],
        access: Access,
        families: MetricFamilies,
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._access = access
        self._families = families
        self._registry = registry
        self._totals = Totals()
        # A worker has no port of its own, so it needs no settings of the others.
        own = config.model_copy(update={"admin_port": None, "probe_port": None})
        self._supervisor = Supervisor(
            own, divisions, registry, on_change=self._report_health, on_ended=self._totals.add
        )
        self._admin = WorkersAdmin(lambda: self._supervisor.serving, self._loaded, self._unloaded)
        self._is_started = False

    async def serve(self) -> None:
        """Serve, then end the process."""
        stop = Stop()
        stop.on_signals()
        servicer = HealthServicer()
        self._probes = Probes(servicer, SERVICES)
        await self._probes.start()
        async with self._metrics_port() as metrics, probe_port(self._config, servicer) as probe:
            models = await self._started(stop)
            if models is None:
                code = await self._supervisor.stop()
            else:
                async with observing(self._config, self._families) as telemetry:
                    code = await self._serve_until_asked(stop, telemetry, models, metrics, probe)
            end_now(code)

    async def _serve_until_asked(
        self, stop: Stop, telemetry: Telemetry, models: list[ReadyModel], metrics: int, probe: int | None
    ) -> int:
        """Report readiness, and keep all workers until asked to stop. Return their exit code once they have drained.

        metrics, probe: ports.
        """
        for model in models:
            await self._probes.announce(model.name, HealthCheckResponse.SERVING)
        self._is_started = True
        await self._report_health()
        waits = build_waits(self._config, self._families)
        async with (
            admin_port(self._config, self._access, self._admin, telemetry, waits) as admin,
            running_in_background(self._supervisor.keep(self._catch_up)),
        ):
            ports = BoundPorts(port=self._config.port, metrics=metrics, admin=admin, probe=probe)
            print(ready_line(self._config, models, ports), flush=True)
            await stop.wait()
            await self._probes.leave()
            return await self._supervisor.stop()

    async def _started(self, stop: Stop) -> list[ReadyModel] | None:
        try:
            return await stop.unless_asked(self._supervisor.start())
        except WorkerFailed:
            await self._supervisor.stop()
            raise

    async def _catch_up(self, worker: WorkerProcess, serve: Callable[[], Awaitable[None]]) -> None:
        async with self._admin.changing:
            await self._admin.catch_up(worker)
            await serve()

    async def _report_health(self) -> None:
        await self._probes.ready(is_ready=self._is_started and self._supervisor.is_ready)

    async def _loaded(self, model: str) -> None:
        await self._probes.announce(model, HealthCheckResponse.SERVING)

    async def _unloaded(self, model: str) -> None:
        await self._probes.announce(model, HealthCheckResponse.NOT_SERVING)
        self._totals.forget(model)

    @contextlib.asynccontextmanager
    async def _metrics_port(self) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        merged = CollectorRegistry()
        # Scrapes run in threads of their own.
        collect = MergedCollector(lambda: asyncio.run_coroutine_threadsafe(self._metrics(), loop).result())
        merged.register(collect)
        with metrics_port(self._config, self._access, merged) as port:
            yield port

    async def _metrics(self) -> list[Metric]:
        """Return the metrics of all workers that serve, and of this process."""
        workers = self._supervisor.serving
        texts = await asyncio.gather(*(worker.metrics(_METRICS_TIMEOUT_S) for worker in workers))
        expositions = {str(worker.spec.index): text for worker, text in zip(workers, texts, strict=True)}
        metrics = self._totals.merged(expositions | {_SUPERVISOR: exposition_of(self._registry)})
        set_resident(metrics, proportional_bytes([os.getpid(), *(worker.pid for worker in workers)]))
        return metrics


def set_resident(metrics: Iterable[Metric], num_bytes: int) -> None:
    """Replace the sum of the resident memory of all processes, which counts pages that they share once each."""
    for family in metrics:
        if family.name == RESIDENT_FAMILY:
            family.samples = []
            family.add_sample(RESIDENT_FAMILY, {}, num_bytes)
