"""Carries many requests over GenerateMany calls, for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio

from antiphon.client.many import END_PATIENCE_S, ManyRequests, Outcome, lost, together
from antiphon.client.messages import ServerError, Source, as_server_error
from antiphon.v1 import inference_pb2

Call = grpc.aio.StreamStreamCall[inference_pb2.GenerateManyRequest, inference_pb2.GenerateManyResponse]

# What grpc.aio says of a call that ends while something is written to it.
_WRITTEN_TOO_LATE = "Internal error from Core"


class Conversation:
    """Sources on their way to a server, and their outcomes, in order. For one event loop; iterate once.

    open_calls: each opens a GenerateMany call over a connection of its own.
    """

    def __init__(
        self, open_calls: Sequence[Callable[[], Call]], sources: AsyncIterator[Source], requests: ManyRequests
    ) -> None:
        self._sources = sources
        self._requests = requests
        self._outboxes = [_Outbox(open_call) for open_call in open_calls]
        self._is_fed = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._has_room = asyncio.Event()
        self._has_news = asyncio.Event()

    async def outcomes(self) -> AsyncIterator[Outcome]:
        """Yield the outcome of each source. Leaving the iteration cancels what is unanswered.

        Raises the errors of the sources.
        """
        talks = (self._talk(index, outbox) for index, outbox in enumerate(self._outboxes))
        tasks = [asyncio.create_task(work) for work in (self._feed(), *talks)]
        for task in tasks:
            task.add_done_callback(lambda _: self._has_news.set())
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                for outcome in self._requests.take():
                    yield outcome
                self._has_room.set()
                for task in tasks:
                    if task.done():
                        task.result()
                if self._is_fed and self._requests.is_finished:
                    break
            await self._end_calls(tasks[1:])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._timer is not None:
                self._timer.cancel()

    async def _end_calls(self, talks: list[asyncio.Task[None]]) -> None:
        """End the calls, so that the server counts them as complete and not as cancelled."""
        for outbox in self._outboxes:
            outbox.end()
        await asyncio.wait(talks, timeout=END_PATIENCE_S)

    async def _feed(self) -> None:
        """Read sources as far as there is room."""
        async for source in self._sources:
            while not self._requests.has_room:
                self._has_room.clear()
                await self._has_room.wait()
            self._requests.add(source)
            self._send_due()
        self._is_fed = True

    def _send_due(self) -> None:
        """Send what is due, and come back when the next request is."""
        for call, message in self._requests.due():
            self._outboxes[call].put(message)
        self._has_news.set()
        wake_s = self._requests.wake_s
        if self._timer is not None:
            if self._timer.when() == wake_s:
                return
            self._timer.cancel()
        self._timer = None if wake_s is None else self._loop.call_at(wake_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._send_due()

    async def _talk(self, index: int, outbox: _Outbox) -> None:
        """Send requests and read answers, over a new call if the last one broke."""
        while (call := await outbox.open()) is not None:
            writing = asyncio.create_task(outbox.write_to(call))
            error = lost()
            try:
                async for response in call:
                    self._requests.read(index, response)
                    self._send_due()
            except grpc.aio.AioRpcError as broken:
                error = end_of_call(broken)
            finally:
                writing.cancel()
                call.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            if outbox.is_ended:
                return
            outbox.clear()
            self._requests.broken(index, error)
            self._send_due()


class _Outbox:
    """Requests on their way into the calls of one connection, one call after the other. is_ended: there are no more."""

    def __init__(self, open_call: Callable[[], Call]) -> None:
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

    async def open(self) -> Call | None:
        """Return a new call once there is something to send, or None if there will be nothing."""
        await self._has_unsent.wait()
        return None if self.is_ended else self._open_call()

    async def write_to(self, call: Call) -> None:
        with ended_call():  # the reader learns why it has ended
            while True:
                await self._has_unsent.wait()
                unsent = self._unsent
                self.clear()
                for message in together(unsent):
                    await call.write(message)
                if self.is_ended:
                    await call.done_writing()
                    return


def end_of_call(error: grpc.aio.AioRpcError) -> ServerError:
    """Return why a call ended.

    If something is written while the server ends the call, grpc.aio reports INTERNAL and a text of its own instead of
    the server's status.
    """
    is_own = error.code() is grpc.StatusCode.INTERNAL and error.details() == _WRITTEN_TOO_LATE
    return lost() if is_own else as_server_error(error)


def ended_call() -> contextlib.AbstractContextManager[None]:
    """Suppress what grpc.aio raises when something is written to a call that has ended."""
    return contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
