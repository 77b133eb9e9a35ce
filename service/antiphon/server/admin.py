"""antiphon.v1.AdminService: loads and unloads models through a separate port, and shows their memory and caches.

The port is off by default, and on loopback by default: every client that reaches it may load any bundle of this disk.
It also serves channelz, which shows every connection of the process with the addresses of its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_reflection.v1alpha import reflection
from pydantic import TypeAdapter, ValidationError

from antiphon.domain.errors import BadBundle, InvalidArgument
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.background import in_background
from antiphon.rpc.client_waits import ClientWaits
from antiphon.rpc.endpoints import Method
from antiphon.rpc.middleware import CallMiddleware, handlers_of
from antiphon.rpc.v1.models import LoadedModel
from antiphon.server.access import Access
from antiphon.server.models.control import Control
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.ports import admin_options, listening
from antiphon.server.settings import MAX_GRACE_S, ModelName, ModelSettings, ServerConfig
from antiphon.server.settings_sources import allowed_of_model
from antiphon.v1 import admin_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
CHANNELZ_NAME: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

_NAMES: TypeAdapter[str] = TypeAdapter(ModelName)


class Admin(Protocol):
    """Methods of the service. They raise AntiphonError. context: of the call, which none needs."""

    async def load_model(self, message: pb.LoadModelRequest, context: object = None) -> pb.LoadModelResponse:
        """Load a bundle and serve it."""
        ...

    async def unload_model(self, message: pb.UnloadModelRequest, context: object = None) -> pb.UnloadModelResponse:
        """Stop serving a model and unload it."""
        ...

    async def get_memory(self, message: pb.GetMemoryRequest, context: object = None) -> pb.GetMemoryResponse:
        """Return the bytes of each model in the memory budget."""
        ...

    async def get_cache(self, message: pb.GetCacheRequest, context: object = None) -> pb.GetCacheResponse:
        """Return the cache blocks of each model, and the running requests that hold them."""
        ...


class AdminServicer:
    """Methods of a process. They raise AntiphonError."""

    def __init__(self, control: Control, budget: MemoryBudget, config: ServerConfig) -> None:
        self._control = control
        self._budget = budget
        self._config = config

    async def load_model(self, message: pb.LoadModelRequest, context: object = None) -> pb.LoadModelResponse:
        """Load a bundle and serve it."""
        plan = self._config.plan(_checked_name(message.name), _settings(message))
        if not plan.path.is_dir():
            raise BadBundle(f"{plan.path} is no directory of this server")
        served = await self._control.load(plan)
        return pb.LoadModelResponse(model=served.description)

    async def unload_model(self, message: pb.UnloadModelRequest, context: object = None) -> pb.UnloadModelResponse:
        """Stop serving a model and unload it."""
        grace_s = self._config.drain_grace_s
        if message.HasField("grace"):
            grace_s = message.grace.seconds + message.grace.nanos / 1e9
            if not 0 <= grace_s <= MAX_GRACE_S:
                raise InvalidArgument("grace", f"{grace_s} s", f"0 to {MAX_GRACE_S} s")
        return pb.UnloadModelResponse(has_drained=await self._control.unload(message.name, grace_s))

    async def get_memory(self, message: pb.GetMemoryRequest, context: object = None) -> pb.GetMemoryResponse:
        """Return the bytes of each model in the memory budget."""
        models = [
            pb.ModelMemory(
                name=name,
                weight_bytes=memory.weight_bytes,
                cache_bytes=memory.cache_bytes,
                workspace_bytes=memory.workspace_bytes,
            )
            for name, memory in sorted(self._budget.reserved.items())
        ]
        return pb.GetMemoryResponse(budget_bytes=self._budget.limit_bytes, models=models)

    async def get_cache(self, message: pb.GetCacheRequest, context: object = None) -> pb.GetCacheResponse:
        """Return the cache blocks of each model, or of the named one, and the running requests that hold them."""
        models = self._control.models
        chosen = [models.find(message.model)] if message.model else sorted(models, key=lambda served: served.name)
        # In threads, because steps may be under way, and because the messages of large caches take time.
        uses = [in_background(partial(_cache_use, served), "cache") for served in chosen]
        return pb.GetCacheResponse(caches=await asyncio.gather(*uses))


def build_admin_server(
    servicer: Admin,
    telemetry: Telemetry,
    waits: ClientWaits,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """Return a gRPC server with the admin service and reflection, not yet bound to a port."""
    server = grpc.aio.server(options=admin_options(), interceptors=interceptors)
    methods: dict[str, Method] = {
        "LoadModel": servicer.load_model,
        "UnloadModel": servicer.unload_model,
        "GetMemory": servicer.get_memory,
        "GetCache": servicer.get_cache,
    }
    server.add_generic_rpc_handlers((handlers_of(SERVICE, methods, CallMiddleware(telemetry, waits)),))
    channelz.add_channelz_servicer(server)
    reflection.enable_server_reflection((SERVICE.full_name, CHANNELZ_NAME, reflection.SERVICE_NAME), server)
    return server


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


def _cache_use(served: LoadedModel) -> pb.CacheUse:
    """Return the use of one model's cache. Blocks while its engine changes its state: not for an event loop."""
    engine = served.engine
    holders = [
        pb.CacheHolder(
            request_number=holder.ticket, source_blocks=holder.source_blocks, target_blocks=holder.target_blocks
        )
        for holder in engine.block_holders()
    ]
    return pb.CacheUse(model=served.name, num_blocks=engine.num_blocks, holders=holders)


def _checked_name(name: str) -> str:
    try:
        return _NAMES.validate_python(name)
    except ValidationError:
        allowed = "1 to 64 letters, digits, dots, underscores and hyphens, the first a letter or digit"
        raise InvalidArgument("name", name, allowed) from None


def _settings(message: pb.LoadModelRequest) -> ModelSettings:
    if not Path(message.path).is_absolute() or "\0" in message.path:
        raise InvalidArgument("path", message.path, "the absolute path of a bundle's directory on the server")
    limits = {field.name: value for field, value in message.limits.ListFields()}
    try:
        return ModelSettings(path=Path(message.path), **limits)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0])
        raise InvalidArgument(f"limits.{field}", limits[field], allowed_of_model(field)) from None
