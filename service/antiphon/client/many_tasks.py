"""Carries many requests with tasks of an event loop: over GenerateMany calls, or with a call for each source."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from antiphon.client.connection import Offer, offer_of
from antiphon.client.many import END_PATIENCE_S, WINDOW_PER_REQUEST, ManyRequests, Outcome, early_end, pack
from antiphon.client.messages import ServerError, Source, as_generations, as_server_error
from antiphon.client.options import CallOptions
from antiphon.v1 import inference_pb2

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub

T = TypeVar("T")
R = TypeVar("R")

ManyCall = grpc.aio.StreamStreamCall[inference_pb2.GenerateManyRequest, inference_pb2.GenerateManyResponse]
OpenCall = Callable[[], ManyCall]
"""Opens a GenerateMany call."""

UnaryCall = grpc.aio.UnaryUnaryCall[inference_pb2.GenerateUnaryRequest, inference_pb2.GenerateUnaryResponse]

# What grpc.aio says of a call that ends while something is written to it.
_WRITTEN_TOO_LATE = "Internal error from Core"


async def ask_offer(stub: InferenceServiceAsyncStub, call_options: CallOptions) -> Offer:
    """Send a GenerateMany call without requests, and return the answer."""
    call = stub.GenerateMany(**call_options.arguments())
    with _ended_call():
        await call.done_writing()
    return offer_of(await call.code(), await call.trailing_metadata())


def open_many(stub: InferenceServiceAsyncStub, call_options: CallOptions) -> ManyCall:
    """Open a GenerateMany call without a deadline."""
    return stub.GenerateMany(**call_options.arguments(math.inf))


def open_unary(
    stub: InferenceServiceAsyncStub, request: inference_pb2.GenerateUnaryRequest, call_options: CallOptions
) -> UnaryCall:
    """Send a request for complete targets; the answer is awaited later."""
    return stub.GenerateUnary(request, **call_options.arguments())


def many_outcomes(
    open_calls: Sequence[OpenCall], sources: Iterable[Source] | AsyncIterable[Source], requests: ManyRequests
) -> AsyncIterator[Outcome]:
    """Return an iterator over the outcome of each source, in order. Leaving it cancels what is unanswered.

    open_calls: each opens a call over a connection of its own. Raises the errors of the sources.
    """
    return _Exchange(open_calls, _as_async(sources), requests).outcomes()


def unary_outcomes(
    open_call: Callable[[Source], UnaryCall], sources: Iterable[Source] | AsyncIterable[Source], *, concurrency: int
) -> AsyncIterator[Outcome]:
    """Return an iterator over the outcomes as many_outcomes does, with a call for each source."""

    async def outcome(source: Source) -> Outcome:
        try:
            return as_generations(await open_call(source))
        except grpc.RpcError as error:
            return as_server_error(error)

    return ordered_map(_as_async(sources), outcome, concurrency=concurrency)


async def _as_async(sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncIterator[Source]:
    if isinstance(sources, AsyncIterable):
        async for source in sources:
            yield source
    else:
        for source in sources:
            yield source


async def ordered_map(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], *, concurrency: int
) -> AsyncIterator[R]:
    """Yield `await work(item)` for each item, in the order of items, with at most `concurrency` at once.

    Items are read lazily: at most WINDOW_PER_REQUEST * concurrency items, and one more, are read and not yet yielded.
    The first exception of an item, or of `items`, ends the iteration. Leaving the iteration cancels running work.
    """
    slots = asyncio.Semaphore(concurrency)
    room = asyncio.Semaphore(WINDOW_PER_REQUEST * concurrency)
    window: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()
    started: set[asyncio.Task[R]] = set()

    async def run(item: T) -> R:
        async with slots:
            return await work(item)

    async def feed() -> None:
        try:
            async for item in items:
                await room.acquire()
                task = asyncio.create_task(run(item))
                started.add(task)
                window.put_nowait(task)
        finally:
            window.put_nowait(None)

    feeder = asyncio.create_task(feed())
    try:
        while (task := await window.get()) is not None:
            yield await task
            started.discard(task)
            room.release()
        await feeder
    finally:
        await _cancel(feeder, *started)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Exchange:
    """Sources on their way to a server, and their outcomes, in order. For one event loop; iterate once."""

    def __init__(self, open_calls: Sequence[OpenCall], sources: AsyncIterator[Source], requests: ManyRequests) -> None:
        self._sources = sources
        self._requests = requests
        self._outboxes = [_Outbox(open_call) for open_call in open_calls]
        self._has_read_all = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._has_room = asyncio.Event()
        self._has_outcomes = asyncio.Event()

    async def outcomes(self) -> AsyncIterator[Outcome]:
        runs = (self._run_call(index, outbox) for index, outbox in enumerate(self._outboxes))
        tasks = [asyncio.create_task(coroutine) for coroutine in (self._read_sources(), *runs)]
        for task in tasks:
            task.add_done_callback(lambda _: self._has_outcomes.set())
        try:
            while True:
                await self._has_outcomes.wait()
                self._has_outcomes.clear()
                for outcome in self._requests.take_outcomes():
                    yield outcome
                self._has_room.set()
                for task in tasks:
                    if task.done():
                        task.result()
                if self._has_read_all and self._requests.is_finished:
                    break
            await self._end_calls(tasks[1:])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._timer is not None:
                self._timer.cancel()

    async def _end_calls(self, runs: list[asyncio.Task[None]]) -> None:
        """End the calls, so that the server counts them as complete and not as cancelled."""
        for outbox in self._outboxes:
            outbox.end()
        await asyncio.wait(runs, timeout=END_PATIENCE_S)

    async def _read_sources(self) -> None:
        """Add sources as far as there is room."""
        async for source in self._sources:
            while not self._requests.has_room:
                self._has_room.clear()
                await self._has_room.wait()
            self._requests.add(source)
            self._send_due()
        self._has_read_all = True

    def _send_due(self) -> None:
        """Send what is due, and come back when the next request is."""
        for call, message in self._requests.take_due():
            self._outboxes[call].put(message)
        self._has_outcomes.set()
        wake_s = self._requests.wake_s
        if self._timer is not None:
            if self._timer.when() == wake_s:
                return
            self._timer.cancel()
        self._timer = None if wake_s is None else self._loop.call_at(wake_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._send_due()

    async def _run_call(self, index: int, outbox: _Outbox) -> None:
        """Send requests and read answers, over a new call if the last one broke."""
        while (call := await outbox.open()) is not None:
            writing = asyncio.create_task(outbox.write_to(call))
            error = early_end()
            try:
                async for response in call:
                    self._requests.read_response(index, response)
                    self._send_due()
            except grpc.aio.AioRpcError as rpc_error:
                error = end_of_call(rpc_error)
            finally:
                writing.cancel()
                call.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            if outbox.is_ended:
                return
            outbox.clear()
            self._requests.fail_call(index, error)
            self._send_due()


class _Outbox:
    """Requests on their way into the calls of one connection, one call after the other. is_ended: there are no more."""

    def __init__(self, open_call: OpenCall) -> None:
        self.is_ended = False
        self._open_call = open_call
        self._unsent: list[inference_pb2.ManyRequest] = []
        self._has_unsent = asyncio.Event()

    def put(self, message: inference_pb2.ManyRequest) -> None:
        self._unsent.append(message)
        self._has_unsent.set()

    def clear(self) -> None:
        self._unsent = []
        self._has_unsent.clear()

    def end(self) -> None:
        self.is_ended = True
        self._has_unsent.set()

    async def open(self) -> ManyCall | None:
        """Return a new call once there is something to send, or None if there will be nothing."""
        await self._has_unsent.wait()
        return None if self.is_ended else self._open_call()

    async def write_to(self, call: ManyCall) -> None:
        with _ended_call():  # the reader learns why it has ended
            while True:
                await self._has_unsent.wait()
                unsent = self._unsent
                self.clear()
                for message in pack(unsent):
                    await call.write(message)
                if self.is_ended:
                    await call.done_writing()
                    return


def end_of_call(error: grpc.aio.AioRpcError) -> ServerError:
    """Return the error with which a call ended.

    If something is written while the server ends the call, grpc.aio reports INTERNAL and a text of its own instead of
    the server's status.
    """
    is_own = error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITTEN_TOO_LATE
    return early_end() if is_own else as_server_error(error)


def _ended_call() -> contextlib.AbstractContextManager[None]:
    """Suppress what grpc.aio raises when something is written to a call that has ended."""
    return contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
