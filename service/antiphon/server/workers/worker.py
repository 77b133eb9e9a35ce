"""Worker process: an event loop and engines of its own, behind a port that other workers share.

    python -m antiphon.server.workers.worker FD < role.json

FD: number of its end of the link with the supervisor.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import OverBudget
from antiphon.engine.interpreter import interpreter_for_steps
from antiphon.observability.logs.formats import configure_logging
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.ports import PortError
from antiphon.rpc.reloading import FileMetrics, FileProblem
from antiphon.rpc.v1.models import LoadedModel
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer
from antiphon.server.lifecycle import EXIT_ENGINE_FAULT, EXIT_USER_ERROR, Stop, end_now
from antiphon.server.listener import listening_to_the_end
from antiphon.server.models.loading import Shared, StartupError
from antiphon.server.observation import observing
from antiphon.server.parts import Parts, shared_parts, within_files
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.link import Link
from antiphon.server.workers.merged_metrics import exposition_of
from antiphon.server.workers.role import Role
from antiphon.v1 import admin_pb2


def main() -> NoReturn:
    """Serve until the supervisor says to stop, or has ended."""
    role, config = Role.of_json(sys.stdin.buffer.read())
    end = socket.socket(fileno=int(sys.argv[1]))
    if role.cores:
        os.sched_setaffinity(0, role.cores)
    handler = configure_logging(config.log_level, config.log_format, worker=role.index)
    try:
        config = within_files(config)
        registry = CollectorRegistry()
        shared = shared_parts(config, registry, num_workers=role.num_workers)
        handler.report_drops(shared.families.log_lines_dropped.inc)
        access = Access(config, FileMetrics(shared.families))
        with interpreter_for_steps():
            uvloop.run(_serve(role, config, access, shared, registry, end))
    except (StartupError, OverBudget, PortError, FileProblem) as error:
        print(f"antiphon serve: {error}", file=sys.stderr)
    end_now(EXIT_USER_ERROR)


async def _serve(
    role: Role, config: ServerConfig, access: Access, shared: Shared, registry: CollectorRegistry, end: socket.socket
) -> NoReturn:
    """Serve, then end the process."""
    async with observing(config, shared.families) as telemetry:
        # Keeps a reference, because a server without one stops.
        code, _server = await _serve_calls(role, config, access, shared, telemetry, registry, end)
    end_now(code)


async def _serve_calls(
    role: Role,
    config: ServerConfig,
    access: Access,
    shared: Shared,
    telemetry: Telemetry,
    registry: CollectorRegistry,
    end: socket.socket,
) -> tuple[int, grpc.aio.Server]:
    """Serve. Return the exit code and the server, whose port is still open."""
    stop = Stop()
    stop.on_signals()
    parts = await Parts.assemble(config, access, shared, telemetry, place=role.place)
    desk = _Desk(parts, config, lambda: exposition_of(registry))
    link = asyncio.create_task(_until_lost(await Link.over(end, desk.answer)))
    async with contextlib.AsyncExitStack() as ports:

        async def open_port() -> None:
            certificates = access.port_certificates(is_shared=True)
            port = listening_to_the_end(parts.server, config.host, config.port, certificates)
            await ports.enter_async_context(port)

        if role.opens_early:
            await open_port()
        served = await parts.load(stop)
        if served is None or not await desk.may_serve(served, stop):
            return 0, parts.server
        if not role.opens_early:
            await open_port()
        await parts.probes.ready()
        async with parts.monitored():
            desk.is_serving.set()
            code = await parts.until_stopped(stop)
            link.cancel()
            return code, parts.server


async def _until_lost(link: Link) -> NoReturn:
    """End the process with its supervisor: nobody would stop it, and it would keep the port from the next server."""
    await link.run()
    end_now(EXIT_ENGINE_FAULT)


class _Desk:
    """Answers the supervisor's questions.

    exposition: returns all metrics as text. is_serving: set once the worker accepts requests.
    """

    def __init__(self, parts: Parts, config: ServerConfig, exposition: Callable[[], str]) -> None:
        self._parts = parts
        self._exposition = exposition
        self._admin = AdminServicer(parts.control, parts.shared.budget, config)
        self._loaded: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._go = asyncio.Event()
        self.is_serving = asyncio.Event()

    async def may_serve(self, served: list[LoadedModel], stop: Stop) -> bool:
        """Report the loaded models. Return True when the supervisor lets them be served, False if it stops first."""
        self._loaded.set_result([_described(one) for one in served])
        return bool(await stop.unless_asked(self._go.wait()))

    async def answer(self, question: str, value: Any) -> Any:
        """Answer a question of the supervisor."""
        match question:
            case "loaded":
                return await self._loaded
            case "serve":
                self._go.set()
                await self.is_serving.wait()
                return None
            case "is_live":
                return self._parts.probes.is_live
            case "metrics":
                return await asyncio.to_thread(self._exposition)
            case "load_model":
                load = admin_pb2.LoadModelRequest.FromString(base64.b64decode(value))
                return _text((await self._admin.load_model(load)).SerializeToString())
            case "unload_model":
                unload = admin_pb2.UnloadModelRequest.FromString(base64.b64decode(value))
                return _text((await self._admin.unload_model(unload)).SerializeToString())
            case "get_memory":
                memory = await self._admin.get_memory(admin_pb2.GetMemoryRequest())
                return _text(memory.SerializeToString())
            case "get_cache":
                asked = admin_pb2.GetCacheRequest.FromString(base64.b64decode(value))
                return _text((await self._admin.get_cache(asked)).SerializeToString())
        raise ValueError(question)


def _described(served: LoadedModel) -> dict[str, str]:
    description = _text(served.description.SerializeToString())
    return {"name": served.name, "precision": served.precision, "description": description}


def _text(message: bytes) -> str:
    return base64.b64encode(message).decode()


if __name__ == "__main__":
    main()
