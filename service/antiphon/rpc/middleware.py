"""Middlewares of every call, composed once for each method: telemetry, errors, callers' turns, limits, client waits.

A middleware wraps the handling of a call and sees gRPC's own context. An `Endpoint` is innermost; its check refuses a
call before all middlewares. A unary answer has a time limit until its client has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from antiphon.domain.errors import AntiphonError, MetadataTooLarge, TooManyRpcs
from antiphon.observability.call import CallRecord, log_request_id
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.client_waits import COPIES, ClientWaits, Stage
from antiphon.rpc.context import GrpcContext, Metadata, RequestContext, caller_of
from antiphon.rpc.endpoints import (
    Check,
    Endpoint,
    GrpcMethod,
    Handler,
    Method,
    NoRequest,
    ServerCall,
    grpc_handler,
    one_request,
    request_stream,
)
from antiphon.rpc.grpc_fixes.core_cancel import cancel_call
from antiphon.rpc.grpc_fixes.deadline import monotonic_deadline_s
from antiphon.rpc.grpc_fixes.resets import Resets
from antiphon.rpc.parsing import parser
from antiphon.rpc.status import ClientGone, abort, code_of, failure_of, forget_frames, status_of

# Delay before a client should retry a call that was refused for the number of calls: some have ended by then.
_FULL_RETRY_S = 1.0
# Calls that start in one iteration of the event loop, each with 0.1 to 1 ms of work.
_CALLS_PER_TURN = 8

Trailer = Callable[[CallRecord], tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Limits on the calls of a server; None is no limit."""

    max_rpcs: int | None = None
    """Maximum number of concurrent RPCs, streams of requests included."""
    max_metadata_bytes: int | None = None
    """Maximum size of the metadata of one call, as HTTP/2 counts it."""


NO_LIMITS = CallLimits()


Middleware = Callable[[Handler, ServerCall], Awaitable[Any]]
"""Handles a call by way of the next handler, before, after or instead of which it does its own work."""


def compose(middlewares: Sequence[Middleware], handler: Handler) -> Handler:
    """Return a handler within all middlewares, the first one outermost."""
    for middleware in reversed(middlewares):
        handler = partial(middleware, handler)
    return handler


class ActiveCalls:
    """Numbers of the calls in flight. For the event loop."""

    def __init__(self) -> None:
        self._num_active = 0  # a drain waits for these
        self._num_open = 0  # streams that may idle; a drain does not wait for these
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def total(self) -> int:
        """Number of calls, and of requests of streams."""
        return self._num_active + self._num_open

    async def wait_until_idle(self) -> None:
        """Return when no call is in flight, except streams that may idle."""
        await self._idle.wait()

    def enter(self, *, is_open: bool = False) -> None:
        """Count a call, or a request of a stream. is_open: a stream that may idle."""
        if is_open:
            self._num_open += 1
        else:
            self._num_active += 1
            self._idle.clear()

    def leave(self, *, is_open: bool = False) -> None:
        """Count the end of a call, or of a request of a stream."""
        if is_open:
            self._num_open -= 1
            return
        self._num_active -= 1
        if self._num_active == 0:
            self._idle.set()


class TelemetryMiddleware:
    """Reports every call exactly once to telemetry, at its end, and removes it from the calls in flight."""

    def __init__(self, telemetry: Telemetry, active: ActiveCalls, waits: ClientWaits, resets: Resets | None) -> None:
        self._telemetry = telemetry
        self._active = active
        self._waits = waits
        self._resets = resets

    async def __call__(self, handler: Handler, call: ServerCall) -> Any:
        """Handle a call. Its end is recorded automatically once its status is written."""
        # A callback of the task, because a callback of gRPC's context would keep the call in memory after its end.
        call.task.add_done_callback(lambda _: self.leave(call))
        try:
            return await handler(call)
        finally:
            if call.answer is None:  # otherwise reported when the answer is written
                self._telemetry.end(call.record)

    def leave(self, call: ServerCall) -> None:
        """Record that the status of a call is written, or that its client has left."""
        if call.answer is not None:
            self._waits.end(call.answer)
            call.answer = None  # it refers to this call: a cycle would keep both in memory
            self._telemetry.end(call.record)
        if self._resets is not None:
            is_reset = not call.has_request and call.record.code == "CANCELLED"
            self._resets.ended(call.record.connection, is_reset=is_reset)
        self._telemetry.left()
        self._active.leave(is_open=call.is_open)


class ErrorMiddleware:
    """Ends every call with exactly one status and its trailers, also if its handler raises."""

    def __init__(self) -> None:
        self.last_trailer: Trailer | None = None
        """Returns one more trailer of every call. It is called when the status is known."""
        self._refusing: set[asyncio.Task[None]] = set()

    async def __call__(self, handler: Handler, call: ServerCall) -> Any:
        """Handle a call. Raises AbortError for a status other than OK, or CancelledError if none can be sent now."""
        try:
            answer = await handler(call)
            call.record.code = code_of(call.grpc)
            call.grpc.set_trailing_metadata(self._trailers(call.record))
            return answer
        except BaseException as error:
            if (failure := failure_of(call.context, call.grpc, error)) is not None:
                await self._fail(call, *failure)
            raise

    def refuse(self, call: ServerCall, error: AntiphonError) -> None:
        """End a call whose handler waits. The status ends the wait."""
        call.record.error = error
        code, message, metadata = status_of(error)
        task = asyncio.ensure_future(self._abort_from_other_task(call, code, message, metadata))
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    async def refuse_unread(self, record: CallRecord, context: GrpcContext, error: AntiphonError) -> None:
        """End a call whose request is not read. Returns once the status is sent; gRPC raises its AbortError later.

        Raises CancelledError if the client has left.
        """
        record.error = error
        code, message, metadata = status_of(error)
        record.code = code.name
        try:
            await context.abort(code, message, (*metadata, *self._trailers(record)))
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = None  # gRPC keeps the exception, and its frames would keep the call
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None

    async def _fail(self, call: ServerCall, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        """End a call with a status other than OK. Raises AbortError, or CancelledError if it cannot be sent now."""
        record = call.record
        try:
            await abort(record, call.grpc, code, message, (*metadata, *self._trailers(record)))
        except ClientGone:
            if isinstance(record.error, NoRequest):  # the call was reset, not ended without a request
                record.code, record.error = "CANCELLED", None
        raise asyncio.CancelledError from None

    async def _abort_from_other_task(
        self, call: ServerCall, code: grpc.StatusCode, message: str, metadata: Metadata
    ) -> None:
        """End a call with a status from a task other than its handler's, then cancel the handler."""
        with contextlib.suppress(grpc.aio.BaseError, ClientGone, asyncio.CancelledError):
            await abort(call.record, call.grpc, code, message, (*metadata, *self._trailers(call.record)))
        call.task.cancel()  # it may wait for something other than its client

    def _trailers(self, record: CallRecord) -> Metadata:
        if self.last_trailer is not None:
            record.trailers.append(self.last_trailer(record))
        return tuple(record.trailers)


class CallTurns:
    """Fair order in which calls of different callers start on the event loop.

    Without it, a burst of thousands of calls from one client would run before a single call that another client sends a
    moment later. Each iteration of the loop starts a few calls. When more calls wait, their callers take turns.
    """

    def __init__(self, calls_per_turn: int = _CALLS_PER_TURN) -> None:
        self._calls_per_turn = self._num_left = calls_per_turn
        self._is_scheduled = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the caller whose turn is next comes first

    async def __call__(self, handler: Handler, call: ServerCall) -> Any:
        """Handle a call when it is its caller's turn."""
        await self.take(call.record.caller)
        return await handler(call)

    @property
    def num_waiting(self) -> int:
        """Number of calls that have not started."""
        return sum(map(len, self._waiting.values()))

    async def take(self, caller: str) -> None:
        """Wait until a call may start. Returns immediately unless many other calls have just started."""
        if not self._is_scheduled:
            self._schedule()
        if self._num_left > 0 and not self._waiting:
            self._num_left -= 1
            return
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(start)
        await start

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._num_left = self._calls_per_turn
        while self._waiting and self._num_left > 0:
            if self._start_next():
                self._num_left -= 1
        if self._waiting:
            self._schedule()

    def _start_next(self) -> bool:
        """Start the oldest call of the next caller. Return False if that call has ended already."""
        caller, starts = next(iter(self._waiting.items()))
        start = starts.popleft()
        del self._waiting[caller]
        if starts:
            self._waiting[caller] = starts  # behind the other callers
        if start.done():
            return False
        start.set_result(None)
        return True


class LimitMiddleware:
    """Refuses calls with too much metadata, and calls beyond the limit on their number."""

    def __init__(self, limits: CallLimits, active: ActiveCalls, waits: ClientWaits) -> None:
        self._limits = limits
        self._active = active
        self._waits = waits

    async def __call__(self, handler: Handler, call: ServerCall) -> Any:
        """Handle a call that is within the limits."""
        self.check(call.record)
        return await handler(call)

    def check(self, record: CallRecord) -> None:
        """Raise MetadataTooLarge, or TooManyRpcs if there are too many calls and none of them waits for its client.

        Core itself refuses large metadata only from clients that have acknowledged its settings.
        """
        longest, limit = self._limits.max_metadata_bytes, self._limits.max_rpcs
        if longest is not None and record.num_metadata_bytes > longest:
            raise MetadataTooLarge(f"metadata has {record.num_metadata_bytes} bytes; it must have at most {longest}")
        if limit is None or self._active.total <= limit or self._waits.make_room(limit):
            return
        raise TooManyRpcs(f"{limit} calls are in flight, which is max_concurrent_rpcs", retry_after_s=_FULL_RETRY_S)


def refusal_of(check: Check, record: CallRecord, limits: CallLimits) -> AntiphonError | None:
    """Return the error with which a check refuses a call; None if it passes, or if its metadata exceeds a limit."""
    longest = limits.max_metadata_bytes
    if longest is not None and record.num_metadata_bytes > longest:
        return None  # `LimitMiddleware` refuses it, because it must not be sent again
    try:
        check(record)
    except AntiphonError as error:
        forget_frames(error)  # the error outlives the call, as a part of its record
        return error
    return None


async def wait_for_reader(handler: Handler, call: ServerCall) -> bytes | None:
    """Handle a call, and record that its unary answer waits until its client has read it; None for a stream."""
    answer = await handler(call)
    if answer is None:
        return None
    data: bytes = answer.SerializeToString()

    def give_up(error: AntiphonError) -> None:
        """End the call with an error instead of an answer that its client does not read."""
        code, message, _ = status_of(error)
        call.record.code, call.record.error = code.name, error
        cancel_call(call.grpc, code, message)

    call.answer = call.wait(Stage.ANSWER, give_up, COPIES * len(data))
    call.context.waits.begin(call.answer)
    return data


class CallMiddleware:
    """Middlewares of one port, around the endpoints of its methods. For the event loop."""

    def __init__(
        self,
        telemetry: Telemetry,
        waits: ClientWaits,
        limits: CallLimits = NO_LIMITS,
        resets: Resets | None = None,
    ) -> None:
        """resets: closes connections that reset their calls; None closes none."""
        self._telemetry = telemetry
        self._resets = resets
        self._waits = waits
        self._limits = limits
        self._active = ActiveCalls()
        self._errors = ErrorMiddleware()
        self._turns = CallTurns()
        self._middlewares: tuple[Middleware, ...] = (
            TelemetryMiddleware(telemetry, self._active, waits, resets),
            self._errors,
            self._turns,
            LimitMiddleware(limits, self._active, waits),
            wait_for_reader,
        )

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self._active.wait_until_idle()

    def expect(self, name: str) -> None:
        """Show the metrics of a method name for `request` at zero."""
        self._telemetry.expect(name)

    def end_with(self, trailer: Trailer) -> None:
        """Add a trailer to every RPC. The function is called when its status is known."""
        self._errors.last_trailer = trailer

    def apart(self, *, is_logged: bool = True) -> CallMiddleware:
        """Return separate middlewares, for RPCs that no drain waits for and that do not count towards this limit."""
        telemetry = self._telemetry if is_logged else self._telemetry.without_sinks()
        return CallMiddleware(telemetry, self._waits, self._limits, self._resets)

    def guard(self, name: str, endpoint: Endpoint) -> GrpcMethod:
        """Return an endpoint within all middlewares. name: `package.Service/Method`, for metrics and log lines."""
        self._telemetry.expect(name)
        handle = compose(self._middlewares, endpoint.handler)
        check = endpoint.check

        async def guarded(_: object, context: GrpcContext) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            connection = context.peer()
            caller = caller_of(context, connection)
            record = self._telemetry.begin(name, metadata, caller=caller, connection=connection)
            self._active.enter(is_open=endpoint.is_open)
            if check is not None and (error := refusal_of(check, record, self._limits)) is not None:
                await self._refuse(record, context, error)
                return None  # gRPC ends the call: its status is sent
            return await handle(self._call(record, metadata, context, is_open=endpoint.is_open))

        return guarded

    async def _refuse(self, record: CallRecord, context: GrpcContext, error: AntiphonError) -> None:
        """End a call, and report it, without middlewares: under overload most calls end here."""
        try:
            await self._errors.refuse_unread(record, context, error)
        finally:
            self._telemetry.end(record)
            if self._resets is not None:
                self._resets.ended(record.connection, is_reset=False)
            self._telemetry.left()
            self._active.leave()

    def _call(self, record: CallRecord, metadata: Metadata, context: GrpcContext, *, is_open: bool) -> ServerCall:
        """Return a call that has begun. `TelemetryMiddleware` records its end."""
        log_request_id.set(record.request_id)
        request = RequestContext(
            record=record,
            metadata=metadata,
            deadline_s=monotonic_deadline_s(context),
            waits=self._waits,
            send=context.write,
            send_headers=context.send_initial_metadata,
        )
        return ServerCall(request, context, is_open, self._errors.refuse)

    @contextlib.contextmanager
    def request(self, name: str, context: RequestContext) -> Iterator[RequestContext]:
        """Count and report one request of a stream as an RPC. Enter it in the request's own task.

        The caller sets the code of the record when the request ends.
        """
        call = context.record
        record = self._telemetry.begin(name, context.metadata, caller=call.caller, connection=call.connection)
        log_request_id.set(record.request_id)
        self._active.enter()
        try:
            yield context.derive(record=record)
        finally:
            self.end_request(record)

    def begin_request(self, call: CallRecord, name: str, request_id: str) -> CallRecord:
        """Count one request of a call as an RPC, without a task of its own, and begin its record; see end_request."""
        self._active.enter()
        return self._telemetry.begin_request(call, name, request_id)

    def end_request(self, record: CallRecord) -> None:
        """Report a request that `begin_request` began. The caller has set its code."""
        self._telemetry.end(record)
        self._telemetry.left()
        self._active.leave()

    async def turn(self, context: RequestContext) -> None:
        """Wait until one more request of a call may start: callers take turns on the event loop."""
        await self._turns.take(context.caller)


def handlers_of(
    service: ServiceDescriptor,
    methods: dict[str, Method],
    middleware: CallMiddleware,
    checks: Mapping[str, Check] | None = None,
) -> grpc.GenericRpcHandler:
    """Return the handlers of a service's methods by name. The service's descriptor says which of them stream.

    checks: of methods with one request, before it is read.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        parse = parser(GetMessageClass(descriptor.input_type))
        if descriptor.client_streaming:
            endpoint = request_stream(method, parse)
        else:
            endpoint = one_request(method, parse, (checks or {}).get(name))
        guarded = middleware.guard(f"{service.full_name}/{name}", endpoint)
        handlers[name] = grpc_handler(guarded, is_streaming=descriptor.server_streaming)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)
