"""How messages leave: how many tokens each brings, and how long one may wait for its reader. Shared by every model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from antiphon.service.domain.errors import AntiphonError
from antiphon.service.observability.call import REQUEST_ID_KEY, Call, current_call
from antiphon.service.rpc.calls.client_waits import ClientWaits, Stage, Wait


class Pacing:
    """Keeps the messages of all streams together below a rate. For the event loop.

    waits: where a message waits that its client has not read, and how long it may.
    """

    def __init__(self, max_messages_per_s: float, waits: ClientWaits) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._waits = waits
        self._num_streams = 0

    @property
    def waits(self) -> ClientWaits:
        """The calls that wait for their clients."""
        return self._waits

    @property
    def window_s(self) -> float:
        """Seconds for which one more stream gathers tokens for a message.

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
        """Return what sends the messages of the RPC under way."""
        return Writer(self._waits, context)


class Writer:
    """Sends the headers of one RPC, which bear its request id, and its messages, one at a time.

    Made in the RPC's own task.
    """

    def __init__(self, waits: ClientWaits, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._waits = waits
        self._context = context
        self._call = call = current_call()
        self._headers = () if call is None else ((REQUEST_ID_KEY, call.request_id),)
        self._has_begun = False

    async def write(self, message: Message) -> None:
        """Send a message; returns when the client's flow control has let it go.

        Raises SlowReader where that takes too long, or too much waits to be read, CancelledError where the call ends
        meanwhile. What the stream gathers until then goes with the next message.
        """
        call = self._call
        writing = _Writing(self._waits, call, message.ByteSize())
        try:
            if not self._has_begun:
                # With the first message, they would be given up with it, and no status could be sent after that.
                await self._context.send_initial_metadata(self._headers)
                self._has_begun = True
            await self._context.write(message)
        except asyncio.CancelledError:
            writing.raise_slow()
            raise
        except grpc.aio.InternalError:  # the client, or its time, went before the message did
            raise asyncio.CancelledError from None
        finally:
            writing.end()
        if call is not None:
            call.num_messages += 1
            call.num_unsent_bytes = 0


class _Writing:
    """One message that waits for its client, in the task that writes it."""

    def __init__(self, waits: ClientWaits, call: Call | None, num_bytes: int) -> None:
        self._waits = waits
        self._task = asyncio.current_task()
        self._slow: AntiphonError | None = None
        caller, connection = ("", "") if call is None else (call.caller, call.connection)
        if call is not None:
            call.num_unsent_bytes = num_bytes
        self._wait = Wait(Stage.ANSWER, caller, connection, self._give_up, num_bytes)
        waits.begin(self._wait)

    def end(self) -> None:
        """Wait no longer. The two refer to each other, and there is one for each message: the collector is spared."""
        self._waits.end(self._wait)
        del self._wait

    def raise_slow(self) -> None:
        """Raise what the message was given up with, where that and nothing else cancelled its task."""
        if self._slow is not None and self._task is not None and self._task.uncancel() == 0:
            raise self._slow from None

    def _give_up(self, error: AntiphonError) -> None:
        if self._task is not None and not self._task.cancelling():  # its call has ended otherwise
            self._slow = error
            self._task.cancel()
