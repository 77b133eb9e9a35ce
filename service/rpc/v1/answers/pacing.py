"""Pace of streamed messages: tokens per message, and the time limit for a client to read one. Shared by all models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from antiphon.service.domain.errors import AntiphonError
from antiphon.service.observability.call import REQUEST_ID_KEY, Call, current_call
from antiphon.service.rpc.calls.waits.client_waits import ClientWaits, Stage, Wait


class Pacing:
    """Keeps the total rate of messages of all streams below a limit. For the event loop.

    waits: records messages that wait for their client, with a time limit.
    """

    def __init__(self, max_messages_per_s: float, waits: ClientWaits) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._waits = waits
        self._num_streams = 0

    @property
    def waits(self) -> ClientWaits:
        """Calls that wait for their clients."""
        return self._waits

    @property
    def window_s(self) -> float:
        """Seconds for which a new stream collects tokens for one message.

        A message costs CPU time that the models need. With few streams each token is sent at once, with many streams
        several tokens share a message.
        """
        return (self._num_streams + 1) / self._max_messages_per_s

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream until the context exits."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def writer(self, context: grpc.aio.ServicerContext[Any, Any]) -> Writer:
        """Return the writer of the current RPC's messages."""
        return Writer(self._waits, context)


class Writer:
    """Sends the headers of one RPC, with its request id, and its messages, one at a time.

    Create it in the RPC's own task.
    """

    def __init__(self, waits: ClientWaits, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._waits = waits
        self._context = context
        self._call = call = current_call()
        self._headers = () if call is None else ((REQUEST_ID_KEY, call.request_id),)
        self._has_begun = False

    async def write(self, message: Message) -> None:
        """Send a message. Returns when the client's flow control has accepted it.

        Raises SlowReader if that takes too long or too many bytes are unread, CancelledError if the call ends first.
        Tokens that the stream collects until then go with the next message.
        """
        call = self._call
        writing = _Writing(self._waits, call, message.ByteSize())
        try:
            if not self._has_begun:
                # Sent separately: if they waited with the first message, a cancelled write would prevent any status.
                await self._context.send_initial_metadata(self._headers)
                self._has_begun = True
            await self._context.write(message)
        except asyncio.CancelledError:
            writing.raise_slow()
            raise
        except grpc.aio.InternalError:  # the client left, or its deadline passed, before the message was sent
            raise asyncio.CancelledError from None
        finally:
            writing.end()
        if call is not None:
            call.num_messages += 1
            call.num_unsent_bytes = 0


class _Writing:
    """Message that waits for its client, in the task that writes it."""

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
        """End the wait, and break the reference cycle with it, which the garbage collector need not find then."""
        self._waits.end(self._wait)
        del self._wait

    def raise_slow(self) -> None:
        """Raise the error that ended the wait, if that alone cancelled the task."""
        if self._slow is not None and self._task is not None and self._task.uncancel() == 0:
            raise self._slow from None

    def _give_up(self, error: AntiphonError) -> None:
        if self._task is not None and not self._task.cancelling():  # otherwise its call has ended already
            self._slow = error
            self._task.cancel()
