"""Worker process: an event loop behind a port that other workers share, with engines of its own or of another process.

    python -m antiphon.server.workers.worker LINK MEETING < worker.json

LINK, MEETING: numbers of its ends of the link with the supervisor, and of the socket over which that introduces it to
other processes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import grpc.aio
import uvloop
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import OverBudget
from antiphon.engine.engine import interpreter_for_steps
from antiphon.observability.logging import configure_logging
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.background import running_in_background
from antiphon.rpc.ports import PortError
from antiphon.rpc.reloading import FileMetrics, FileProblem
from antiphon.rpc.v1.models import LoadedModel
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer
from antiphon.server.app import App, observing, shared_resources, within_files
from antiphon.server.lifecycle import EXIT_ENGINE_FAULT, EXIT_USER_ERROR, Stop, end_now
from antiphon.server.models.loading import SharedResources, StartupError
from antiphon.server.ports import listening_to_the_end
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.division import Role
from antiphon.server.workers.fronts import Front, Fronts
from antiphon.server.workers.link import Link, WorkerSpec
from antiphon.server.workers.merged_metrics import WithoutEngines, exposition_of
from antiphon.v1 import admin_pb2 as pb


def main() -> NoReturn:
    """Serve until the supervisor says to stop, or has ended."""
    spec, config = WorkerSpec.from_json(sys.stdin.buffer.read())
    link, meeting = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    handler = configure_logging(config.log_level, config.log_format, worker=spec.index)
    try:
        config = within_files(config)
        registry = CollectorRegistry()
        if spec.role is Role.FRONT:
            config = config.model_copy(update={"device": "cpu"})
        num_alike = 1 if spec.role is Role.ENGINE else spec.num_answering
        resources = shared_resources(config, registry, num_workers=num_alike)
        handler.report_drops(resources.families.log_lines_dropped.inc)
        access = Access(config, FileMetrics(resources.families))
        with interpreter_for_steps():
            uvloop.run(_serve(spec, config, access, resources, registry, Ends(link, meeting)))
    except (StartupError, OverBudget, PortError, FileProblem) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
    end_now(EXIT_USER_ERROR)


class Ends(NamedTuple):
    """This process's ends of sockets to its supervisor."""

    link: socket.socket
    meeting: socket.socket


async def _serve(
    spec: WorkerSpec,
    config: ServerConfig,
    access: Access,
    resources: SharedResources,
    registry: CollectorRegistry,
    ends: Ends,
) -> NoReturn:
    """Serve, then end the process."""
    async with observing(config, resources.families) as telemetry:
        # Keeps a reference, because a server without one stops.
        code, _server = await _serve_calls(spec, config, access, resources, telemetry, registry, ends)
    end_now(code)


async def _serve_calls(
    spec: WorkerSpec,
    config: ServerConfig,
    access: Access,
    resources: SharedResources,
    telemetry: Telemetry,
    registry: CollectorRegistry,
    ends: Ends,
) -> tuple[int, grpc.aio.Server]:
    """Serve. Return the exit code and the server, whose port is still open."""
    stop = Stop()
    stop.on_signals()
    partner: Fronts | Front | None = None
    if spec.role is Role.FRONT:
        partner = Front(spec)
        resources = replace(resources, engine_link=partner.link)
    label = None if spec.role is Role.ENGINE else spec.label
    app = await App.build(config, access, resources, telemetry, worker_label=label)
    if spec.role is Role.ENGINE:
        partner = Fronts(app.control)
    if partner is not None:
        partner.meet(ends.meeting)
    metrics = WithoutEngines(registry) if spec.role is Role.FRONT else registry
    service = _WorkerService(app, config, lambda: exposition_of(metrics))
    link = asyncio.create_task(_until_lost(await Link.over(ends.link, service.handle)))
    async with contextlib.AsyncExitStack() as ports:

        async def open_port() -> None:
            if spec.role is Role.ENGINE:
                return
            certificates = access.port_certificates(is_shared=True)
            port = listening_to_the_end(app.server, config.host, config.port, certificates)
            await ports.enter_async_context(port)

        if spec.opens_early:
            await open_port()
        models = await app.load(stop)
        if models is None or not await service.may_serve(models, stop):
            return 0, app.server
        if not spec.opens_early:
            await open_port()
        await app.probes.ready()
        async with app.watching(), running_in_background(*([] if partner is None else [partner.run(app.probes)])):
            service.is_serving.set()
            code = await app.until_stopped(stop)
            link.cancel()
            if isinstance(partner, Fronts):
                await partner.flush()
            return code, app.server


async def _until_lost(link: Link) -> NoReturn:
    """End the process with its supervisor: nobody would stop it, and it would keep the port from the next server."""
    await link.run()
    end_now(EXIT_ENGINE_FAULT)


class _WorkerService:
    """Methods that the supervisor calls.

    exposition: returns all metrics as text. is_serving: set once the worker accepts requests.
    """

    def __init__(self, app: App, config: ServerConfig, exposition: Callable[[], str]) -> None:
        self._app = app
        self._exposition = exposition
        admin = AdminServicer(app.control, app.resources.budget, config)
        self._admin_methods: dict[str, tuple[Callable[[Any], Awaitable[Message]], type[Message]]] = {
            "load_model": (admin.load_model, pb.LoadModelRequest),
            "unload_model": (admin.unload_model, pb.UnloadModelRequest),
            "get_memory": (admin.get_memory, pb.GetMemoryRequest),
            "get_cache": (admin.get_cache, pb.GetCacheRequest),
        }
        self._loaded: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._go = asyncio.Event()
        self.is_serving = asyncio.Event()

    async def may_serve(self, models: list[LoadedModel], stop: Stop) -> bool:
        """Report the loaded models. Return True when the supervisor lets them be served, False if it stops first."""
        self._loaded.set_result([_described(served) for served in models])
        return bool(await stop.unless_asked(self._go.wait()))

    async def handle(self, method: str, argument: Any) -> Any:
        """Return the result of a method."""
        match method:
            case "loaded":
                return await self._loaded
            case "serve":
                self._go.set()
                await self.is_serving.wait()
                return None
            case "is_live":
                return self._app.probes.is_live
            case "metrics":
                return await asyncio.to_thread(self._exposition)
        call, request = self._admin_methods[method]
        return _text((await call(request.FromString(base64.b64decode(argument)))).SerializeToString())


def _described(served: LoadedModel) -> dict[str, str]:
    description = _text(served.description.SerializeToString())
    return {"name": served.name, "precision": served.precision, "description": description}


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode()


if __name__ == "__main__":
    main()
