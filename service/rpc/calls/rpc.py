"""Handling common to all RPCs: a request id, a place, the request, accounts, and a status for any error.

A unary request is read here and not by gRPC, so that a call is refused before its message is read, and a client has a
time limit to send it. A unary answer is watched until its client has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from antiphon.service.domain.errors import AntiphonError, InvalidArgument, InWords, MetadataTooLarge, TooManyRpcs
from antiphon.service.observability.call import Call, enter_call
from antiphon.service.observability.telemetry import Context as Context
from antiphon.service.observability.telemetry import Telemetry
from antiphon.service.rpc.calls.call_turns import CallTurns
from antiphon.service.rpc.calls.client_waits import ClientWaits, Stage, Wait
from antiphon.service.rpc.calls.core_cancel import cancel_call
from antiphon.service.rpc.calls.ending import ClientGone, abort, code_of, failure_of
from antiphon.service.rpc.calls.parsing import Malformed, Parser, parser
from antiphon.service.rpc.calls.refusal import Metadata, status_of
from antiphon.service.rpc.calls.resets import Resets

# When a client that is refused for the number of calls may come again: some have ended by then.
_FULL_RETRY_S = 1.0

Method = Callable[[Any, Context], Awaitable[Any]]
Trailer = Callable[[Call], tuple[str, bytes]]


class _NoRequest(InvalidArgument):
    """A client ended its side of a call, or the whole call, without a request."""


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(slots=True, eq=False)
class _Rpc:
    """An RPC under way.

    answer: a unary answer that its client has not read; None before there is one. has_request: its request was read.
    """

    call: Call
    context: Context
    handler: asyncio.Task[Any] = field(default_factory=_current_task)
    answer: Wait | None = None
    has_request: bool = False

    def wait(self, stage: Stage, give_up: Callable[[AntiphonError], None], num_bytes: int = 0) -> Wait:
        """Return what stands for this call while it waits for its client."""
        return Wait(stage, self.call.caller, self.call.connection, give_up, num_bytes)

    def give_up_answer(self, error: AntiphonError) -> None:
        """End the call with an error instead of an answer that its client does not read."""
        code, message, _ = status_of(error)
        self.call.code, self.call.error = code.name, error
        cancel_call(self.context, code, message)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Bounds on the calls of a server; None is no limit.

    max_rpcs: most RPCs at once, streams of requests included. max_metadata_bytes: of one call, as HTTP/2 counts them.
    """

    max_rpcs: int | None = None
    max_metadata_bytes: int | None = None


NO_LIMITS = CallLimits()


class InFlight:
    """The RPCs under way: their number, its limit, and an account of each. For the event loop."""

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
        self._num_open = 0  # streams that may idle, for which it does not
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusing: set[asyncio.Task[None]] = set()

    async def wait_until_idle(self) -> None:
        """Return when no RPC is in flight."""
        await self._idle.wait()

    def expect(self, name: str) -> None:
        """Show the counts of what `request` is to be entered for."""
        self._telemetry.expect(name)

    def end_with(self, trailer: Trailer) -> None:
        """Ask for one more trailer of every RPC, when its status is known."""
        self._last_trailer = trailer

    def apart(self, *, is_logged: bool = True) -> InFlight:
        """Return an account of RPCs that no drain waits for, and that take no place of these."""
        telemetry = self._telemetry if is_logged else self._telemetry.without_sinks()
        return InFlight(telemetry, self._waits, self._limits, self._resets)

    def guard(self, name: str, method: Method, parse: Parser) -> Method:
        """Return a handler of one request: its method, with all that this module is for.

        name: `package.Service/Method`. The method returns the answer, or writes a stream and returns None.
        """
        self._telemetry.expect(name)

        async def guarded(_: object, context: Context) -> Any:
            rpc = self._enter(name, context)
            return await self._concluded(rpc, lambda: self._answered(rpc, method, parse))

        return guarded

    def guard_open(self, name: str, method: Method, parse: Parser) -> Method:
        """As guard, of a method whose stream may idle for as long as its client likes."""
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
        """As guard, of a method that reads a stream of requests; in flight is only what `request` is entered for.

        may_idle: without it, each request has the same time to come as that of a unary call.
        """
        self._telemetry.expect(name)
        stage = Stage.OPEN if may_idle else Stage.REQUEST

        async def guarded(_: object, context: Context) -> Any:
            rpc = self._enter(name, context, is_open=True)
            return await self._concluded(rpc, lambda: method(self._requests(rpc, parse, stage), context))

        return guarded

    def guard_refused(self, name: str, refuse: Callable[[], Awaitable[None]]) -> Method:
        """Return a handler that ends every call with what refuse raises, and reads nothing."""
        self._telemetry.expect(name)

        async def guarded(_: object, context: Context) -> None:
            await self._concluded(self._enter(name, context), refuse)

        return guarded

    @contextlib.contextmanager
    def request(self, name: str, context: Context) -> Iterator[Call]:
        """One request of a stream, in a task of its own: counted, and accounted for, as an RPC is.

        Whoever enters it says in the call how the request ended.
        """
        call = self._begin(name, context)
        self._take()
        try:
            yield call
        finally:
            self._telemetry.end(call)
            self._leave()

    def _begin(self, name: str, context: Context) -> Call:
        """Open the account of a call. No context manager, which would cost each call as much as the account does."""
        call = self._telemetry.begin(name, context)
        enter_call(call)
        return call

    def _enter(self, name: str, context: Context, *, is_open: bool = False) -> _Rpc:
        """Begin an RPC, which leaves by itself once its status is written."""
        rpc = _Rpc(self._begin(name, context), context)
        if is_open:
            self._num_open += 1
        else:
            self._take()
        # Of the task: a callback of the context would keep the call from being freed when it ends.
        rpc.handler.add_done_callback(lambda _: self._exit(rpc, is_open=is_open))
        return rpc

    def _exit(self, rpc: _Rpc, *, is_open: bool) -> None:
        if rpc.answer is not None:
            self._waits.end(rpc.answer)
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
        """Raise MetadataTooLarge, or TooManyRpcs where the newest call is one too many and none waits for its client.

        Core refuses large metadata only of clients that have acknowledged its settings.
        """
        longest, limit = self._limits.max_metadata_bytes, self._limits.max_rpcs
        if longest is not None and call.num_metadata_bytes > longest:
            raise MetadataTooLarge(f"metadata has {call.num_metadata_bytes} bytes; it must have at most {longest}")
        if limit is None or self._num_active + self._num_open <= limit or self._waits.make_room(limit):
            return
        raise TooManyRpcs(f"{limit} calls are in flight, which is max_concurrent_rpcs", retry_after_s=_FULL_RETRY_S)

    async def _concluded(self, rpc: _Rpc, run: Callable[[], Awaitable[Any]]) -> Any:
        """Run an RPC, and end it with a status and trailers, also where it raises."""
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
            if rpc.answer is None:  # else when that is written
                self._telemetry.end(call)

    async def _fail(self, rpc: _Rpc, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        """End an RPC with a status other than OK. Raises AbortError, or CancelledError where it cannot be sent now."""
        call = rpc.call
        try:
            await abort(call, rpc.context, code, message, (*metadata, *self._trailers(call)))
        except ClientGone:
            if isinstance(call.error, _NoRequest):  # the call was reset, not ended without a request
                call.code, call.error = "CANCELLED", None
        raise asyncio.CancelledError from None

    async def _answered(self, rpc: _Rpc, method: Method, parse: Parser) -> bytes | None:
        """Read the request, run the method, and return its answer, watched until it is read; None of a stream."""
        answer = await method(await self._receive(rpc, parse), rpc.context)
        if answer is None:
            return None
        data: bytes = answer.SerializeToString()
        rpc.answer = rpc.wait(Stage.ANSWER, rpc.give_up_answer, len(data))
        self._waits.begin(rpc.answer)
        return data

    async def _receive(self, rpc: _Rpc, parse: Parser) -> Message:
        """Read the one request of a call. Raises InvalidArgument."""
        with self._waiting(rpc, Stage.REQUEST):
            data = await rpc.context.read()
        if data is grpc.aio.EOF:
            await asyncio.sleep(0)  # where the client has ended the call, this task is cancelled now
            raise _NoRequest("message", InWords("missing"), "sent once, before the client ends its side")
        rpc.has_request = True
        return _parsed(parse, data)

    async def _requests(self, rpc: _Rpc, parse: Parser, stage: Stage) -> AsyncIterator[Message]:
        """Yield the requests of a stream; raises where one cannot be parsed."""
        while True:
            with self._waiting(rpc, stage):
                data = await rpc.context.read()
            if data is grpc.aio.EOF:
                return
            rpc.has_request = True
            yield _parsed(parse, data)

    @contextlib.contextmanager
    def _waiting(self, rpc: _Rpc, stage: Stage) -> Iterator[None]:
        """Let a call wait for its client; it is refused where it is given up meanwhile."""
        wait = rpc.wait(stage, lambda error: self._refuse(rpc, error))
        self._waits.begin(wait)
        try:
            yield
        finally:
            self._waits.end(wait)

    def _refuse(self, rpc: _Rpc, error: AntiphonError) -> None:
        """End a call whose handler waits: its status completes what it waits for."""
        rpc.call.error = error
        code, message, metadata = status_of(error)
        task = asyncio.ensure_future(self._abort_beside(rpc, code, message, metadata))
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    async def _abort_beside(self, rpc: _Rpc, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
        """End an RPC with a status from another task than its handler's, and the handler with it."""
        with contextlib.suppress(grpc.aio.BaseError, ClientGone, asyncio.CancelledError):
            await abort(rpc.call, rpc.context, code, message, (*metadata, *self._trailers(rpc.call)))
        rpc.handler.cancel()  # it may wait for something else than its client

    def _trailers(self, call: Call) -> Metadata:
        if self._last_trailer is not None:
            call.trailers.append(self._last_trailer(call))
        return tuple(call.trailers)


def handlers_of(service: ServiceDescriptor, methods: dict[str, Method], in_flight: InFlight) -> grpc.GenericRpcHandler:
    """Return handlers of a service's methods by name, streaming as the service declares."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for name, method in methods.items():
        descriptor = service.methods_by_name[name]
        parse = parser(GetMessageClass(descriptor.input_type))
        guard = in_flight.guard_requests if descriptor.client_streaming else in_flight.guard
        guarded = guard(f"{service.full_name}/{name}", method, parse)
        handlers[name] = handler(guarded, is_streaming=descriptor.server_streaming)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def handler(guarded: Method, *, is_streaming: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a guarded method, which reads its requests itself: to gRPC it always reads a stream."""
    if is_streaming:
        return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=_serialize)
    return grpc.stream_unary_rpc_method_handler(guarded)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parsed(parse: Parser, data: bytes) -> Message:
    request = parse(data)
    if isinstance(request, Malformed):
        raise request.error
    return request
