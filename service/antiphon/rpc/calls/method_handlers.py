"""gRPC handlers of methods: binds a service's methods to their names, with the limits and metrics of `rpc.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from antiphon.rpc.calls.parsing import parser
from antiphon.rpc.calls.rpc import Check, InFlight, Method


def handlers_of(
    service: ServiceDescriptor,
    methods: dict[str, Method],
    in_flight: InFlight,
    checks: Mapping[str, Check] | None = None,
) -> grpc.GenericRpcHandler:
    """Return the handlers of a service's methods by name. The service's descriptor says which of them stream.

    checks: of methods with one request, before it is read.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        parse = parser(GetMessageClass(descriptor.input_type))
        full_name = f"{service.full_name}/{name}"
        if descriptor.client_streaming:
            guarded = in_flight.guard_requests(full_name, method, parse)
        else:
            guarded = in_flight.guard(full_name, method, parse, (checks or {}).get(name))
        handlers[name] = handler(guarded, is_streaming=descriptor.server_streaming)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def handler(guarded: Method, *, is_streaming: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a guarded method. It reads its requests itself, so gRPC always treats them as a stream.

    A method may write messages that it has serialised: gRPC keeps what it was given until the client has read it.
    """
    if is_streaming:
        return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=_serialize)
    return grpc.stream_unary_rpc_method_handler(guarded)


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
