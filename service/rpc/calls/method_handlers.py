"""gRPC handlers of methods: binds a service's methods to their names, with the limits and metrics of `rpc.py`."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from antiphon.service.rpc.calls.parsing import parser
from antiphon.service.rpc.calls.rpc import InFlight, Method


def handlers_of(service: ServiceDescriptor, methods: dict[str, Method], in_flight: InFlight) -> grpc.GenericRpcHandler:
    """Return the handlers of a service's methods by name. The service's descriptor says which of them stream."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        parse = parser(GetMessageClass(descriptor.input_type))
        guard = in_flight.guard_requests if descriptor.client_streaming else in_flight.guard
        guarded = guard(f"{service.full_name}/{name}", method, parse)
        handlers[name] = handler(guarded, is_streaming=descriptor.server_streaming)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def handler(guarded: Method, *, is_streaming: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a guarded method. It reads its requests itself, so gRPC always treats them as a stream."""
    if is_streaming:
        return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=_serialize)
    return grpc.stream_unary_rpc_method_handler(guarded)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
