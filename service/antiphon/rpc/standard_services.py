"""gRPC's standard services: health of the server and its models, reflection, and the refusal of unknown methods.

Readiness: "" and each service name are for the server, `<service>/<model>` is for one model. Liveness has a separate
name, so that a server that drains, or is still loading, is not killed. Calls of these services have the limits of other
calls and are counted but not logged, because probes come every few seconds. A drain does not wait for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.observability.telemetry import Context
from antiphon.rpc.middleware import InFlight, Method, handler
from antiphon.rpc.parsing import Malformed, Parser

LIVENESS = "liveness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthServicer(health.aio.HealthServicer):
    """Health service with List, which grpcio-health-checking declares and does not implement (grpc/grpc#41991)."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Store the status of a service, and send it to those who watch it."""
        self._listed[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: Context) -> Any:
        """Return the status of every service, for a HealthListRequest."""
        messages: Any = health_pb2  # its type stubs lack List
        checks = {name: messages.HealthCheckResponse(status=status) for name, status in self._listed.items()}
        return messages.HealthListResponse(statuses=checks)


class Health:
    """Reads a health servicer, for services that report health in their own messages."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self._servicer = servicer

    async def is_ready(self, context: Context) -> bool:
        """Return whether the server accepts requests. Call it within an RPC."""
        return await self._is_serving("", context)

    async def is_live(self, context: Context) -> bool:
        """Return whether the process is alive. Call it within an RPC."""
        return await self._is_serving(LIVENESS, context)

    async def _is_serving(self, name: str, context: Context) -> bool:
        found = await self._servicer.Check(health_pb2.HealthCheckRequest(service=name), context)
        return found.status == _SERVING


class Probes:
    """Health of a server and its models, stored in a health servicer. For the event loop.

    services: names of the server's readiness, in addition to ""; the first is also the prefix of the models' names.
    """

    def __init__(self, servicer: health.aio.HealthServicer, services: Iterable[str]) -> None:
        self._servicer = servicer
        self._services = tuple(services)
        self._models: dict[str, int] = {}
        self._is_ready = False
        self._is_leaving = False
        self._is_live = True

    async def start(self) -> None:
        """Report the state before any model is loaded: alive and not ready."""
        await self._update()

    async def announce(self, model: str, status: int) -> None:
        """Report the health of a model."""
        self._models[model] = status
        await self._update()

    @property
    def is_live(self) -> bool:
        """True while the process is alive."""
        return self._is_live

    async def ready(self, *, is_ready: bool = True) -> None:
        """Report whether every configured model is loaded, and can be served."""
        self._is_ready = is_ready
        await self._update()

    async def leave(self) -> None:
        """Report, permanently, that the server accepts no more requests."""
        self._is_leaving = True
        await self._update()

    async def live(self, *, is_live: bool) -> None:
        """Report whether the process is alive. A process that is not alive is not ready either."""
        self._is_live = is_live
        await self._update()

    async def _update(self) -> None:
        is_ready = self._is_ready and self._is_live and not self._is_leaving
        for service in ("", *self._services):
            await self._servicer.set(service, _SERVING if is_ready else _NOT_SERVING)
        for model, status in self._models.items():
            await self._servicer.set(f"{self._services[0]}/{model}", _NOT_SERVING if self._is_leaving else status)
        await self._servicer.set(LIVENESS, _SERVING if self._is_live else _NOT_SERVING)


# All unknown methods are counted under one name: clients must not be able to create metric labels.
_UNKNOWN = "(unknown)"
# Second names of services. reflection.v1 has the messages of v1alpha, and grpcio-reflection serves only the latter
# (grpc/grpc#38576); newer clients ask for the former alone.
_ALSO_NAMED = {"grpc.reflection.v1alpha.ServerReflection": ("grpc.reflection.v1.ServerReflection",)}

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Collected:
    """Stand-in for a server that collects the handlers from generated `add_..._to_server` functions."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, Handler]] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore these: `add_registered_method_handlers` passes the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Store the handlers of a service."""
        self.handlers[service] = dict(handlers)


def standard_handlers(add: Callable[[Any], None], in_flight: InFlight) -> list[grpc.GenericRpcHandler]:
    """Return the handlers that `add` registers with a server, with the limits and metrics of in_flight."""
    collected = _Collected()
    add(collected)
    return [
        grpc.method_handlers_generic_handler(
            named, {name: _guarded(f"{named}/{name}", one, in_flight) for name, one in handlers.items()}
        )
        for service, handlers in collected.handlers.items()
        for named in (service, *_ALSO_NAMED.get(service, ()))
    ]


class UnknownMethods(grpc.GenericRpcHandler):
    """Last handler of a server: counts and refuses methods that no other handler knows."""

    def __init__(self, in_flight: InFlight) -> None:
        self._handler = handler(in_flight.guard_refused(_UNKNOWN, _refuse_unknown), is_streaming=True)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """Return the handler that refuses the call."""
        return self._handler


async def _refuse_unknown() -> None:
    raise Unsupported("this server has no such method")


def _guarded(name: str, own: Handler, in_flight: InFlight) -> Handler:
    behaviors: Any = own  # its type stubs describe the synchronous API
    parse = _parser(behaviors.request_deserializer)
    if own.request_streaming:
        method = _writing(behaviors.stream_stream, in_flight)
        return handler(in_flight.guard_requests(name, method, parse, may_idle=False), is_streaming=True)
    if own.response_streaming:
        method = _writing(behaviors.unary_stream, in_flight)
        return handler(in_flight.guard_open(name, method, parse), is_streaming=True)
    return handler(in_flight.guard(name, behaviors.unary_unary, parse), is_streaming=False)


def _writing(behavior: Any, in_flight: InFlight) -> Method:
    """Return a method that writes its messages. Wraps a method that yields them."""
    if not inspect.isasyncgenfunction(behavior):
        method: Method = behavior
        return method

    async def write(requests: Any, context: Context) -> None:
        writer = in_flight.writer(context)
        async for message in behavior(requests, context):
            await writer.write(message.SerializeToString())

    return write


def _parser(deserializer: Callable[[bytes], Any]) -> Parser:
    def parse(data: bytes) -> Message | Malformed:
        try:
            message: Message = deserializer(data)
        except DecodeError:
            return Malformed(InvalidArgument("message", data, "a serialised request of this method"))
        return message

    return parse
