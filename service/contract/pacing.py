"""How messages leave: how many tokens each brings, and how long one may wait for its reader. Shared by every model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc.aio

from antiphon.service.errors import SlowReader
from antiphon.service.observability.call import current_call

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

    async def write(self, context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
        """Send a message of a stream, in a task; returns when the client's flow control has let it go.

        Raises SlowReader where that takes too long, CancelledError where the call ends meanwhile. What the stream
        gathers until then goes with the next message.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._waiting[task] = loop.time()
        if self._watch is None:
            self._watch = loop.call_later(self._patience_s, self._give_up_late, loop)
        try:
            await context.write(message)
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() == 0:  # else the call has ended as well
                raise SlowReader(f"the client took no message for {self._patience_s} s") from None
            raise
        except grpc.aio.InternalError:  # the client, or its time, went before the message did
            raise asyncio.CancelledError from None
        finally:
            self._waiting.pop(task, None)
            self._late.discard(task)
        if (call := current_call()) is not None:
            call.num_messages += 1

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
