"""What every RPC of this server goes through: parsing, counting, and the status of whatever it raises.

grpc's own parser answers a malformed message with INTERNAL; here it becomes a bad request that names the field.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from antiphon.service.errors import AntiphonError, EngineFault, InvalidArgument
from antiphon.service.refusal import status_of

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request message that could not be parsed, and why."""

    error: InvalidArgument


class InFlight:
    """How many RPCs are under way."""

    def __init__(self) -> None:
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self._idle.wait()

    def guard(self, name: str, method: Method) -> Method:
        """The method, counted, and with a status for every error."""

        async def guarded(request: Message | Malformed, context: Context) -> Any:
            self._num_active += 1
            self._idle.clear()
            try:
                if isinstance(request, Malformed):
                    raise request.error
                return await method(request, context)
            except AntiphonError as error:
                await _abort(context, error)
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise  # the call has ended already
            except Exception:
                log.exception("%s failed", name)
                await _abort(context, EngineFault("the server failed; its log says why"))
            finally:
                self._num_active -= 1
                if self._num_active == 0:
                    self._idle.set()

        return guarded


def handlers_of(service: ServiceDescriptor, methods: dict[str, Method], in_flight: InFlight) -> grpc.GenericRpcHandler:
    """Handlers of a service's methods by name, streaming as the service declares, for `add_generic_rpc_handlers`."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        make = (
            grpc.unary_stream_rpc_method_handler if descriptor.server_streaming else grpc.unary_unary_rpc_method_handler
        )
        parse = _parser(GetMessageClass(descriptor.input_type))
        handlers[name] = make(in_flight.guard(name, method), parse, response_serializer=_serialize)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


async def _abort(context: Context, error: AntiphonError) -> None:
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parser(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(data: bytes) -> Message | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed(_explain(kind, data))

    return parse


def _explain(kind: type[Message], data: bytes) -> InvalidArgument:
    """Name the text field that is not UTF-8, wherever it is nested; failing that, blame the message."""
    found = _find_bad_text(kind.DESCRIPTOR, data)
    if found is None:
        return InvalidArgument("message", data, f"a serialised {kind.DESCRIPTOR.full_name}")
    return InvalidArgument(found[0], found[1], "valid UTF-8")


def _find_bad_text(kind: Any, data: bytes) -> tuple[str, bytes] | None:
    """Path and value of the first text that is not UTF-8, if there is one; kind: a message's descriptor."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    for unknown in (fields[index] for index in range(len(fields))):
        field = kind.fields_by_number.get(unknown.field_number)
        if field is None or not isinstance(unknown.data, bytes):
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            return field.name, unknown.data
        if field.message_type is not None and (nested := _find_bad_text(field.message_type, unknown.data)):
            return f"{field.name}.{nested[0]}", nested[1]
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
