"""gRPC's standard services: health of the server and its models, reflection, and the refusal of unknown methods.

Readiness: "" and each service name are for the server, `<service>/<model>` is for one model. Liveness has a separate
name, so that a server that drains, or is still loading, is not killed. Calls of these services have the limits of other
calls and are counted but not logged, because probes come every few seconds. A drain does not wait for them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.rpc.client_waits import Stage
from antiphon.rpc.context import GrpcContext
from antiphon.rpc.endpoints import Endpoint, ServerCall, grpc_handler
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.parsing import Malformed, Parser

LIVENESS = "liveness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthServicer(health.aio.HealthServicer):
    """Health service with List, which grpcio-health-checking declares and does not implement (grpc/grpc#41991)."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, int] = {}

    @property
    def is_ready(self) -> bool:
        """True while the server accepts requests."""
        return self._listed.get("", _SERVING) == _SERVING

    @property
    def is_live(self) -> bool:
        """True while the process is alive."""
        return self._listed.get(LIVENESS) == _SERVING

    async def set(self, service: str, status: int) -> None:
        """Store the status of a service, and send it to those who watch it."""
        self._listed[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: GrpcContext) -> Any:
        """Return the status of every service, for a HealthListRequest."""
        messages: Any = health_pb2  # its type stubs lack List
        checks = {name: messages.HealthCheckResponse(status=status) for name, status in self._listed.items()}
        return messages.HealthListResponse(statuses=checks)


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

GrpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Collected:
    """Stand-in for a server that collects the handlers from generated `add_..._to_server` functions."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, GrpcHandler]] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore these: `add_registered_method_handlers` passes the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, GrpcHandler]) -> None:
        """Store the handlers of a service."""
        self.handlers[service] = dict(handlers)


def standard_handlers(add: Callable[[Any], None], middleware: CallMiddleware) -> list[grpc.GenericRpcHandler]:
    """Return the handlers that `add` registers with a server, within the middlewares."""
    collected = _Collected()
    add(collected)
    return [
        grpc.method_handlers_generic_handler(
            name, {method: _guarded(f"{name}/{method}", own, middleware) for method, own in handlers.items()}
        )
        for service, handlers in collected.handlers.items()
        for name in (service, *_ALSO_NAMED.get(service, ()))
    ]


class UnknownMethods(grpc.GenericRpcHandler):
    """Last handler of a server: counts and refuses methods that no other handler knows."""

    def __init__(self, middleware: CallMiddleware) -> None:
        self._handler = grpc_handler(middleware.guard(_UNKNOWN, Endpoint(_refuse_unknown)), is_streaming=True)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> GrpcHandler:
        """Return the handler that refuses the call."""
        return self._handler


async def _refuse_unknown(call: ServerCall) -> None:
    raise Unsupported("this server has no such method")


def _guarded(name: str, own: GrpcHandler, middleware: CallMiddleware) -> GrpcHandler:
    is_streaming = own.request_streaming or own.response_streaming
    return grpc_handler(middleware.guard(name, _endpoint(own)), is_streaming=is_streaming)


def _endpoint(own: GrpcHandler) -> Endpoint:
    """Return an endpoint that calls a method of a foreign service, which needs gRPC's own context."""
    methods: Any = own  # its type stubs describe the synchronous API
    parse = _parser(methods.request_deserializer)

    async def answer_requests(call: ServerCall) -> None:
        await _write(methods.stream_stream(call.requests(parse, Stage.REQUEST), call.grpc), call)

    async def stream(call: ServerCall) -> None:
        request = await call.receive(parse)
        with call.waiting(Stage.OPEN):
            await _write(methods.unary_stream(request, call.grpc), call)

    async def answer(call: ServerCall) -> Any:
        return await methods.unary_unary(await call.receive(parse), call.grpc)

    if own.request_streaming:
        return Endpoint(answer_requests, is_open=True)
    return Endpoint(stream, is_open=True) if own.response_streaming else Endpoint(answer)


async def _write(messages: Any, call: ServerCall) -> None:
    """Write the messages that a method yields, or wait for a method that writes them itself."""
    if not inspect.isasyncgen(messages):
        await messages
        return
    writer, stream = call.context.writer(), cast("AsyncIterator[Message]", messages)
    async for message in stream:
        await writer.write(message.SerializeToString())


def _parser(deserializer: Callable[[bytes], Any]) -> Parser:
    def parse(data: bytes) -> Message | Malformed:
        try:
            message: Message = deserializer(data)
        except DecodeError:
            return Malformed(InvalidArgument("message", data, "a serialised request of this method"))
        return message

    return parse
