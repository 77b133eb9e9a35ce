"""Handlers of gRPC's standard services (health, reflection) and of unknown methods, with the limits of other calls.

Their calls are counted but not logged, because probes come every few seconds. A drain does not wait for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.rpc.calls.method_handlers import handler
from antiphon.rpc.calls.parsing import Malformed, Parser
from antiphon.rpc.calls.rpc import Context, InFlight, Method

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
