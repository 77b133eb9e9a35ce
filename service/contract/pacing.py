"""How messages leave: how many tokens each brings, and how long one may wait for its reader. Shared by every model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc.aio

from antiphon.service.errors import SlowReader
from antiphon.service.observability.call import REQUEST_ID_KEY, current_call

DEFAULT_PATIENCE_S = 30.0


class Pacing:
    """Keeps the messages of all streams together below a rate, and none waiting for long. For the event loop.

    patience_s: seconds that a message may wait until the client has room for it.
    """

    def __init__(self, max_messages_per_s: float, *, patience_s: float = DEFAULT_PATIENCE_S) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._patience_s = patience_s
        self._num_streams = 0
        # Since when each message waits, by the task that writes it: the oldest first, as patience is one for all. One
        # timer watches the oldest; one for every message cost more than the rest of its way through here.
        self._waiting: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.TimerHandle | None = None

    @property
    def window_s(self) -> float:
        """How long one more stream gathers tokens for a message.

        A message costs CPU that the models need: alone, a stream gets every token by itself; in a crowd, several.
        """
        return (self._num_streams + 1) / self._max_messages_per_s

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as long as the context lasts."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def writer(self, context: grpc.aio.ServicerContext[Any, Any]) -> Writer:
        """What sends the messages of the RPC under way."""
        return Writer(self, context)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Raise SlowReader where what is entered for takes too long, in a task; CancelledError is what ends it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._waiting[task] = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._patience_s, self._give_up_late, loop)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() == 0:  # else the call has ended as well
                raise SlowReader(f"the client took no message for {self._patience_s} s") from None
            raise
        finally:
            self._waiting.pop(task, None)
            self._late.discard(task)

    def _give_up_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the writes that have waited for too long, and look again when the next one will have."""
        self._watch = None
        for task, since_s in list(self._waiting.items()):
            left_s = since_s + self._patience_s - loop.time()
            if left_s > 0:
                self._watch = loop.call_later(left_s, self._give_up_late, loop)
                return
            del self._waiting[task]
            if not task.cancelling():  # its call has ended otherwise
                self._late.add(task)
                task.cancel()


class Writer:
    """Sends the headers of one RPC, which bear its request id, and its messages. Made in the RPC's own task."""

    def __init__(self, pacing: Pacing, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._pacing = pacing
        self._context = context
        call = current_call()
        self._headers = () if call is None else ((REQUEST_ID_KEY, call.request_id),)
        self._has_begun = False

    async def write(self, message: Any) -> None:
        """Send a message; returns when the client's flow control has let it go.

        Raises SlowReader where that takes too long, CancelledError where the call ends meanwhile. What the stream
        gathers until then goes with the next message.
        """
        try:
            with self._pacing.patience():
                if not self._has_begun:
                    # With the first message, they would be given up with it, and no status could be sent after that.
                    await self._context.send_initial_metadata(self._headers)
                    self._has_begun = True
                await self._context.write(message)
        except grpc.aio.InternalError:  # the client, or its time, went before the message did
            raise asyncio.CancelledError from None
        if (call := current_call()) is not None:
            call.num_messages += 1
