"""gRPC handlers of methods: binds a service's methods to their names, with the limits and metrics of `rpc.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from antiphon.domain.errors import AntiphonError, InvalidArgument, InWords, MetadataTooLarge, TooManyRpcs
from antiphon.observability.call import Call, enter_call
from antiphon.observability.telemetry import Context, Telemetry
from antiphon.rpc.client_waits import COPIES, ClientWaits, Stage, Wait, Writer
from antiphon.rpc.grpc_fixes.core_cancel import cancel_call
from antiphon.rpc.grpc_fixes.resets import Resets
from antiphon.rpc.parsing import Malformed, Parser, parser
from antiphon.rpc.status import ClientGone, Metadata, abort, code_of, failure_of, status_of


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(slots=True, eq=False)
class Rpc:
    """RPC in flight.

    answer: unary answer that its client has not read; None before there is one. has_request: its request was read.
    """

    call: Call
    context: Context
    handler: asyncio.Task[Any] = field(default_factory=_current_task)
    answer: Wait | None = None
    has_request: bool = False

    def wait(self, stage: Stage, give_up: Callable[[AntiphonError], None], num_bytes: int = 0) -> Wait:
        """Return the record of this call's wait for its client."""
        return Wait(stage, self.call.caller, self.call.connection, give_up, num_bytes)

    def give_up_answer(self, error: AntiphonError) -> None:
        """End the call with an error instead of an answer that its client does not read."""
        code, message, _ = status_of(error)
        self.call.code, self.call.error = code.name, error
        cancel_call(self.context, code, message)


# Calls that start in one iteration of the event loop, each with 0.1 to 1 ms of work.
_CALLS_PER_TURN = 8


class CallTurns:
    """Calls that wait to start, grouped by caller. For one event loop."""

    def __init__(self, calls_per_turn: int = _CALLS_PER_TURN) -> None:
        self._calls_per_turn = self._num_left = calls_per_turn
        self._is_scheduled = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the caller whose turn is next comes first

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
            self._waiting[caller] = starts  # behind the others
        if start.done():
            return False
        start.set_result(None)
        return True


# Delay before a client should retry a call that was refused for the number of calls: some have ended by then.
_FULL_RETRY_S = 1.0

Method = Callable[[Any, Context], Awaitable[Any]]
Trailer = Callable[[Call], tuple[str, bytes]]


Check = Callable[[Call], None]
"""Refuses a call by raising an AntiphonError."""


class _NoRequest(InvalidArgument):
    """The client ended its side of a call, or the whole call, without a request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Limits on the calls of a server; None is no limit.

    max_rpcs: maximum number of concurrent RPCs, streams of requests included.
    max_metadata_bytes: maximum size of the metadata of one call, as HTTP/2 counts it.
    """

    max_rpcs: int | None = None
    max_metadata_bytes: int | None = None


NO_LIMITS = CallLimits()


class InFlight:
    """RPCs in flight: counts them, applies limits, and reports each to telemetry. For the event loop."""

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
        self._turns = CallTurns()
        self._last_trailer: Trailer | None = None
        self._num_active = 0  # a drain waits for these
        self._num_open = 0  # streams that may idle; a drain does not wait for these
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusing: set[asyncio.Task[None]] = set()

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self._idle.wait()

    def expect(self, name: str) -> None:
        """Show the metrics of a method name for `request` at zero."""
        self._telemetry.expect(name)

    def end_with(self, trailer: Trailer) -> None:
        """Add a trailer to every RPC. The function is called when its status is known."""
        self._last_trailer = trailer

    def apart(self, *, is_logged: bool = True) -> InFlight:
        """Return a separate InFlight, for RPCs that no drain waits for and that do not count towards this limit."""
        telemetry = self._telemetry if is_logged else self._telemetry.without_sinks()
        return InFlight(telemetry, self._waits, self._limits, self._resets)

    def guard(self, name: str, method: Method, parse: Parser, check: Check | None = None) -> Method:
        """Return a handler of a method with one request, with the limits and metrics of this module.

        name: `package.Service/Method`. The method returns the answer, or writes a stream and returns None.
        check: raises an AntiphonError for a call that is refused before its request is read.
        """
        self._telemetry.expect(name)

        async def guarded(_: object, context: Context) -> Any:
            rpc = self._enter(name, context)
            return await self._concluded(rpc, lambda: self._answered(rpc, method, parse, check))

        return guarded

    def guard_open(self, name: str, method: Method, parse: Parser) -> Method:
        """Return a handler as guard does, for a method whose stream may be idle without time limit."""
        self._telemetry.expect(name)

        async def guarded(_: object, context: Context) -> None:
            rpc = self._enter(name, context, is_open=True)

            async def run() -> None:
                request = await self._receive(rpc, parse)
                with self._waiting(rpc, Stage.OPEN):
                    await method(request, context)

            await self._concluded(rpc, run)

        return guarded

    def guard_requests(self, name: str, method: Method, parse: Parser, *, may_idle: bool = True) -> Method:
        """Return a handler as guard does, for a method that reads a stream of requests.

        A drain waits only for the requests that `request` was entered for, not for the call itself.
        may_idle: False gives each request the time limit of a unary call's request.
        """
        self._telemetry.expect(name)
        stage = Stage.OPEN if may_idle else Stage.REQUEST

        async def guarded(_: object, context: Context) -> Any:
            rpc = self._enter(name, context, is_open=True)
            return await self._concluded(rpc, lambda: method(self._requests(rpc, parse, stage), context))

        return guarded

    def guard_refused(self, name: str, refuse: Callable[[], Awaitable[None]]) -> Method:
        """Return a handler that ends every call with the error that refuse raises, without reading a request."""
        self._telemetry.expect(name)

        async def guarded(_: object, context: Context) -> None:
            await self._concluded(self._enter(name, context), refuse)

        return guarded

    def writer(self, context: Context) -> Writer:
        """Return the writer of the current RPC's messages."""
        return Writer(self._waits, context)

    @contextlib.contextmanager
    def request(self, name: str, context: Context) -> Iterator[Call]:
        """Count and report one request of a stream as an RPC. Enter it in the request's own task.

        The caller sets the code of the yielded call when the request ends.
        """
        call = self._begin(name, context)
        self._take()
        try:
            yield call
        finally:
            self._telemetry.end(call)
            self._leave()

    def begin_request(self, call: Call, name: str, request_id: str) -> Call:
        """Count one request of a call as an RPC, without a task of its own, and begin its record; see end_request."""
        self._take()
        return self._telemetry.begin_request(call, name, request_id)

    def end_request(self, call: Call) -> None:
        """Report a request that `begin_request` began. The caller has set its code."""
        self._telemetry.end(call)
        self._leave()

    async def turn(self, call: Call) -> None:
        """Wait until one more request of a call may start: callers take turns on the event loop."""
        await self._turns.take(call.caller)

    def _begin(self, name: str, context: Context) -> Call:
        """Begin the record of a call. Not a context manager: that would double the cost for each call."""
        call = self._telemetry.begin(name, context)
        enter_call(call)
        return call

    def _enter(self, name: str, context: Context, *, is_open: bool = False) -> Rpc:
        """Begin an RPC. Its end is recorded automatically once its status is written."""
        rpc = Rpc(self._begin(name, context), context)
        if is_open:
            self._num_open += 1
        else:
            self._take()
        # A callback of the task, because a callback of the context would keep the call in memory after its end.
        rpc.handler.add_done_callback(lambda _: self._exit(rpc, is_open=is_open))
        return rpc

    def _exit(self, rpc: Rpc, *, is_open: bool) -> None:
        if rpc.answer is not None:
            self._waits.end(rpc.answer)
            rpc.answer = None  # it refers to this RPC: a cycle would keep both in memory
            self._telemetry.end(rpc.call)
        if self._resets is not None:
            is_reset = not rpc.has_request and rpc.call.code == "CANCELLED"
            self._resets.ended(rpc.call.connection, is_reset=is_reset)
        if is_open:
            self._num_open -= 1
            self._telemetry.left()
        else:
            self._leave()

    def _take(self) -> None:
        self._num_active += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._telemetry.left()
        self._num_active -= 1
        if self._num_active == 0:
            self._idle.set()

    def _check(self, call: Call) -> None:
        """Raise MetadataTooLarge, or TooManyRpcs if there are too many calls and none of them waits for its client.

        Core itself refuses large metadata only from clients that have acknowledged its settings.
        """
        longest, limit = self._limits.max_metadata_bytes, self._limits.max_rpcs
        if longest is not None and call.num_metadata_bytes > longest:
            raise MetadataTooLarge(f"metadata has {call.num_metadata_bytes} bytes; it must have at most {longest}")
        if limit is None or self._num_active + self._num_open <= limit or self._waits.make_room(limit):
            return
        raise TooManyRpcs(f"{limit} calls are in flight, which is max_concurrent_rpcs", retry_after_s=_FULL_RETRY_S)

    async def _concluded(self, rpc: Rpc, run: Callable[[], Awaitable[Any]]) -> Any:
        """Run an RPC and end it with a status and trailers, also if it raises."""
        call, context = rpc.call, rpc.context
        try:
            await self._turns.take(call.caller)
            self._check(call)
            answer = await run()
            call.code = code_of(context)
            context.set_trailing_metadata(self._trailers(call))
            return answer
        except BaseException as error:
            if (failure := failure_of(call, context, error)) is not None:
                await self._fail(rpc, *failure)
            raise
        finally:
            if rpc.answer is None:  # otherwise reported when the answer is written
                self._telemetry.end(call)

    async def _fail(self, rpc: Rpc, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        """End an RPC with a status other than OK. Raises AbortError, or CancelledError if it cannot be sent now."""
        call = rpc.call
        try:
            await abort(call, rpc.context, code, message, (*metadata, *self._trailers(call)))
        except ClientGone:
            if isinstance(call.error, _NoRequest):  # the call was reset, not ended without a request
                call.code, call.error = "CANCELLED", None
        raise asyncio.CancelledError from None

    async def _answered(self, rpc: Rpc, method: Method, parse: Parser, check: Check | None) -> bytes | None:
        """Read the request, run the method, and return its answer, which must be read in time; None for a stream."""
        if check is not None:
            check(rpc.call)
        answer = await method(await self._receive(rpc, parse), rpc.context)
        if answer is None:
            return None
        data: bytes = answer.SerializeToString()
        rpc.answer = rpc.wait(Stage.ANSWER, rpc.give_up_answer, COPIES * len(data))
        self._waits.begin(rpc.answer)
        return data

    async def _receive(self, rpc: Rpc, parse: Parser) -> Message:
        """Read the one request of a call. Raises InvalidArgument."""
        with self._waiting(rpc, Stage.REQUEST):
            data = await rpc.context.read()
        if data is grpc.aio.EOF:
            await asyncio.sleep(0)  # if the client has ended the call, this task is cancelled here
            raise _NoRequest("message", InWords("missing"), "sent once, before the client ends its side")
        rpc.has_request = True
        return _parsed(parse, data)

    async def _requests(self, rpc: Rpc, parse: Parser, stage: Stage) -> AsyncIterator[Message]:
        """Yield the requests of a stream. Raises InvalidArgument if one cannot be parsed."""
        while True:
            with self._waiting(rpc, stage):
                data = await rpc.context.read()
            if data is grpc.aio.EOF:
                return
            rpc.has_request = True
            yield _parsed(parse, data)

    @contextlib.contextmanager
    def _waiting(self, rpc: Rpc, stage: Stage) -> Iterator[None]:
        """Record that a call waits for its client. It may be refused meanwhile."""
        wait = rpc.wait(stage, lambda error: self._refuse(rpc, error))
        self._waits.begin(wait)
        try:
            yield
        finally:
            self._waits.end(wait)

    def _refuse(self, rpc: Rpc, error: AntiphonError) -> None:
        """End a call whose handler waits. The status ends the wait."""
        rpc.call.error = error
        code, message, metadata = status_of(error)
        task = asyncio.ensure_future(self._abort_from_other_task(rpc, code, message, metadata))
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    async def _abort_from_other_task(self, rpc: Rpc, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        """End an RPC with a status from a task other than its handler's, then cancel the handler."""
        with contextlib.suppress(grpc.aio.BaseError, ClientGone, asyncio.CancelledError):
            await abort(rpc.call, rpc.context, code, message, (*metadata, *self._trailers(rpc.call)))
        rpc.handler.cancel()  # it may wait for something other than its client

    def _trailers(self, call: Call) -> Metadata:
        if self._last_trailer is not None:
            call.trailers.append(self._last_trailer(call))
        return tuple(call.trailers)


def _parsed(parse: Parser, data: bytes) -> Message:
    request = parse(data)
    if isinstance(request, Malformed):
        raise request.error
    return request


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
