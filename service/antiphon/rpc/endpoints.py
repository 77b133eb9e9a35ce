"""Endpoints of methods: read the requests of a call, and pass them to a method with a RequestContext.

Requests are read here and not by gRPC: so a call can be refused before its message is read, and the client has a time
limit to send it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from antiphon.domain.errors import AntiphonError, InvalidArgument, InWords
from antiphon.observability.call import CallRecord
from antiphon.rpc.client_waits import Stage, Wait
from antiphon.rpc.context import GrpcContext, RequestContext
from antiphon.rpc.parsing import Parser, parsed

Method = Callable[[Any, RequestContext], Awaitable[Any]]
"""Answers a request or a stream of requests: returns the answer, or writes a stream and returns None."""
GrpcMethod = Callable[[object, GrpcContext], Awaitable[Any]]
Check = Callable[[CallRecord], None]
"""Refuses a call by raising an AntiphonError."""


class NoRequest(InvalidArgument):
    """The client ended its side of a call, or the whole call, without a request."""


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(slots=True, eq=False)
class ServerCall:
    """Call in flight as middlewares see it, from its headers until its status is written."""

    context: RequestContext
    grpc: GrpcContext
    is_open: bool
    """True for a stream that may idle: a drain does not wait for it."""
    refuse: Callable[[ServerCall, AntiphonError], None]
    """Ends the call with an error while its handler waits."""
    task: asyncio.Task[Any] = field(default_factory=_current_task)
    """Task of the handler. It is done when the status is written."""
    answer: Wait | None = None
    """Unary answer that the client has not read; None before there is one."""
    has_request: bool = False
    """True when its request was read, or the first one of its stream."""

    @property
    def record(self) -> CallRecord:
        """Account of the call."""
        return self.context.record

    def wait(self, stage: Stage, give_up: Callable[[AntiphonError], None], num_bytes: int = 0) -> Wait:
        """Return a wait of this call for its client."""
        return Wait(stage, self.record.caller, self.record.connection, give_up, num_bytes)

    @contextlib.contextmanager
    def waiting(self, stage: Stage) -> Iterator[None]:
        """Record that the call waits for its client. It may be refused meanwhile."""
        wait = self.wait(stage, partial(self.refuse, self))
        self.context.waits.begin(wait)
        try:
            yield
        finally:
            self.context.waits.end(wait)

    async def receive(self, parse: Parser) -> Message:
        """Read the one request of the call. Raises InvalidArgument."""
        with self.waiting(Stage.REQUEST):
            data = await self.grpc.read()
        if data is grpc.aio.EOF:
            await asyncio.sleep(0)  # if the client has ended the call, this task is cancelled here
            raise NoRequest("message", InWords("missing"), "sent once, before the client ends its side")
        self.has_request = True
        return parsed(parse, data)

    async def requests(self, parse: Parser, stage: Stage) -> AsyncIterator[Message]:
        """Yield the requests of a stream. Raises InvalidArgument if one cannot be parsed."""
        while True:
            with self.waiting(stage):
                data = await self.grpc.read()
            if data is grpc.aio.EOF:
                return
            self.has_request = True
            yield parsed(parse, data)


Handler = Callable[[ServerCall], Awaitable[Any]]
"""Handles a call: returns its unary answer, or None once its stream is written."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Innermost handler of a method: reads the requests and calls the method.

    is_open: its calls may idle. check: refuses a call before its request is read and before any middleware handles it.
    """

    handler: Handler
    is_open: bool = False
    check: Check | None = None


def one_request(method: Method, parse: Parser, check: Check | None = None) -> Endpoint:
    """Return the endpoint of a method with one request. check: refuses a call before its request is read."""

    async def handle(call: ServerCall) -> Any:
        return await method(await call.receive(parse), call.context)

    return Endpoint(handle, check=check)


def idle_stream(method: Method, parse: Parser) -> Endpoint:
    """Return the endpoint of a method with one request, whose answer is a stream that may idle without time limit."""

    async def handle(call: ServerCall) -> None:
        request = await call.receive(parse)
        with call.waiting(Stage.OPEN):
            await method(request, call.context)

    return Endpoint(handle, is_open=True)


def request_stream(method: Method, parse: Parser) -> Endpoint:
    """Return the endpoint of a method that reads a stream of requests, which may idle.

    A drain waits only for the requests that `CallMiddleware.request` was entered for, not for the call itself.
    """

    async def handle(call: ServerCall) -> Any:
        return await method(call.requests(parse, Stage.OPEN), call.context)

    return Endpoint(handle, is_open=True)


def grpc_handler(guarded: GrpcMethod, *, is_streaming: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a guarded method. It reads its requests itself, so gRPC always treats them as a stream.

    A method may write messages that it has serialised: gRPC keeps what it was given until the client has read it.
    """
    if is_streaming:
        return grpc.stream_stream_rpc_method_handler(guarded, response_serializer=_serialize)
    return grpc.stream_unary_rpc_method_handler(guarded)


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
