"""What every RPC of this server goes through: a request id, parsing, accounts, and the status of whatever it raises.

grpc's own parser answers a malformed message with INTERNAL; here it becomes a bad request that names the field.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from antiphon.service.engine.cancellation import CancelCause
from antiphon.service.errors import AntiphonError, EngineFault, InvalidArgument, TooManyRpcs
from antiphon.service.network.deadline import remaining_s
from antiphon.service.network.refusal import Metadata, status_of
from antiphon.service.observability.call import Call, enter_call
from antiphon.service.observability.logs import where_of
from antiphon.service.observability.telemetry import Context as Context
from antiphon.service.observability.telemetry import Telemetry

log = logging.getLogger(__name__)

# How long the status of a failed call may wait behind messages that its client does not read.
_STATUS_PATIENCE_S = 2.0

# When a client turned away by the number of calls may come again: some have ended by then.
_FULL_RETRY_S = 1.0

Method = Callable[[Any, Context], Awaitable[Any]]
Trailer = Callable[[Call], tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request message that could not be parsed, and why."""

    error: InvalidArgument


class InFlight:
    """The RPCs under way: how many they are, and what is told of each."""

    def __init__(self, telemetry: Telemetry, max_rpcs: int | None = None) -> None:
        """max_rpcs: beyond so many, RPCs are refused; None takes any number. Streams of requests are not counted."""
        self._telemetry = telemetry
        self._max_rpcs = max_rpcs
        self._last_trailer: Trailer | None = None
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self._idle.wait()

    def expect(self, name: str) -> None:
        """Show the counts of what `request` is to be entered for."""
        self._telemetry.expect(name)

    def end_with(self, trailer: Trailer) -> None:
        """Ask for one more trailer of every RPC, when its status is known."""
        self._last_trailer = trailer

    def apart(self) -> InFlight:
        """For RPCs that last as long as their clients like: accounted for like others, and waited for by nobody."""
        return InFlight(self._telemetry, self._max_rpcs)

    def guard(self, name: str, method: Method) -> Method:
        """The method, with a request id, accounts, and a status for every error. name: `package.Service/Method`."""
        self._telemetry.expect(name)

        async def guarded(request: Message | Malformed, context: Context) -> Any:
            self._enter()
            # Once its status is written. (The stub's type is a class, which a function never is.)
            context.add_done_callback(lambda _: self._leave())  # type: ignore[arg-type]
            call = self._begin(name, context)
            try:
                return await self._conclude(call, self._full if self._is_full else method, request, context)
            finally:
                self._telemetry.end(call)

        return guarded

    def guard_requests(self, name: str, method: Method) -> Method:
        """As guard, of a method that reads a stream of requests; in flight is only what `request` is entered for."""
        self._telemetry.expect(name)

        async def guarded(requests: AsyncIterator[Message | Malformed], context: Context) -> Any:
            call = self._begin(name, context)
            try:
                return await self._conclude(call, method, _parsed(requests), context)
            finally:
                self._telemetry.end(call)

        return guarded

    @contextlib.contextmanager
    def request(self, name: str, context: Context) -> Iterator[Call]:
        """One request of a stream, in a task of its own: counted, and accounted for, as an RPC is.

        Whoever enters it says in the call how the request ended.
        """
        call = self._begin(name, context)
        self._enter()
        try:
            yield call
        finally:
            self._telemetry.end(call)
            self._leave()

    @property
    def _is_full(self) -> bool:
        return self._max_rpcs is not None and self._num_active > self._max_rpcs

    async def _full(self, request: Any, context: Context) -> None:
        message = f"{self._max_rpcs} calls are in flight, which is max_concurrent_rpcs"
        raise TooManyRpcs(message, retry_after_s=_FULL_RETRY_S)

    async def _conclude(self, call: Call, method: Method, request: Any, context: Context) -> Any:
        """Run a method, and end its RPC with a status and trailers whatever it raises."""
        try:
            if isinstance(request, Malformed):
                raise request.error
            answer = await method(request, context)
            call.code = _code_of(context)
            context.set_trailing_metadata(self._trailers(call))
            return answer
        except BaseException as error:
            if (failure := _failure(call, context, error)) is not None:
                code, message, metadata = failure
                await _abort(context, code, message, (*metadata, *self._trailers(call)))
            raise

    def _trailers(self, call: Call) -> Metadata:
        if self._last_trailer is not None:
            call.trailers.append(self._last_trailer(call))
        return tuple(call.trailers)

    def _begin(self, name: str, context: Context) -> Call:
        """Open the account of a call. No context manager, which would cost each call as much as the account does."""
        call = self._telemetry.begin(name, context)
        enter_call(call)
        return call

    def _enter(self) -> None:
        self._num_active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_active -= 1
        if self._num_active == 0:
            self._idle.set()


def handlers_of(service: ServiceDescriptor, methods: dict[str, Method], in_flight: InFlight) -> grpc.GenericRpcHandler:
    """Handlers of a service's methods by name, streaming as the service declares, for `add_generic_rpc_handlers`."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        make = _HANDLERS[descriptor.client_streaming, descriptor.server_streaming]
        parse = _parser(GetMessageClass(descriptor.input_type))
        guard = in_flight.guard_requests if descriptor.client_streaming else in_flight.guard
        handlers[name] = make(guard(f"{service.full_name}/{name}", method), parse, response_serializer=_serialize)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


# By whether the client streams, and whether the server does.
_HANDLERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


async def _parsed(requests: AsyncIterator[Message | Malformed]) -> AsyncIterator[Message]:
    """A stream's requests; raises where one could not be parsed."""
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error
        yield request


def _failure(call: Call, context: Context, error: BaseException) -> tuple[grpc.StatusCode, str, Metadata] | None:
    """Note how a call failed; the status to end it with, None where it has ended already, as one that is cancelled."""
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError)):
        call.code = _code_of(context)
        return None
    if not isinstance(error, Exception):  # CancelledError: nobody hears any more
        call.code = "DEADLINE_EXCEEDED" if _is_late(call, context) else "CANCELLED"
        return None
    if not isinstance(error, AntiphonError):
        log.error("%s failed", call.method, extra={"fields": {"exception": where_of(error)}})
        error = EngineFault("the server failed; its log says why")
    call.error = error
    code, message, metadata = status_of(error)
    call.code = code.name
    return code, message, metadata


async def _abort(context: Context, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
    """End an RPC with a status, which waits behind what its client has not read yet, though not here for ever."""
    try:
        async with asyncio.timeout(_STATUS_PATIENCE_S):
            await context.abort(code, message, metadata)
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(_forget_frames, aborted)
        raise
    except TimeoutError:
        raise asyncio.CancelledError from None  # gRPC has it, and tells it as soon as it can
    except grpc.aio.InternalError:  # not even the headers could be sent: there is no way to tell
        raise asyncio.CancelledError from None


def _forget_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold, and of those before it: gRPC keeps the error, the frames the request."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _is_late(call: Call, context: Context) -> bool:
    """Whether a call that is cancelled had run out of time: as its requests were judged, if there were any."""
    causes = [cause for asked in call.asked if (cause := asked.stream.cancel_cause) is not None]
    if causes:
        return CancelCause.DEADLINE in causes
    left_s = remaining_s(context)
    return left_s is not None and left_s <= 0


def _code_of(context: Context) -> str:
    """The name of the status that a method has set, OK where it has not."""
    code = cast("grpc.StatusCode | int | None", context.code())
    if not code:
        return "OK"
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")


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
