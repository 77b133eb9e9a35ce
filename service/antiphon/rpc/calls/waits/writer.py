"""Writes the messages of one RPC, each of which waits for its client within the limits of `ClientWaits`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from antiphon.domain.errors import AntiphonError
from antiphon.observability.call import REQUEST_ID_KEY, Call, current_call
from antiphon.rpc.calls.waits.client_waits import COPIES, ClientWaits, Stage, Wait


class Writer:
    """Sends the headers of one RPC, with its request id, and its messages, one at a time.

    Create it in the RPC's own task. backlog_bytes: returns the memory of what is ready to follow a message.
    """

    def __init__(
        self,
        waits: ClientWaits,
        context: grpc.aio.ServicerContext[Any, Any],
        backlog_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._waits = waits
        self._backlog_bytes = backlog_bytes
        self._context = context
        self._call = call = current_call()
        self._headers = () if call is None else ((REQUEST_ID_KEY, call.request_id),)
        self._has_begun = False

    async def write(self, data: bytes) -> None:
        """Send a serialised message. Returns when the client's flow control has accepted it.

        Callers must not keep the message itself meanwhile: it takes several times the memory.

        Raises SlowReader if that takes too long or too many bytes are unread, CancelledError if the call ends first.
        Tokens that the stream collects until then go with the next message.
        """
        call = self._call
        writing = _Writing(self._waits, call, len(data), self._backlog_bytes)
        try:
            if not self._has_begun:
                # Sent separately: if they waited with the first message, a cancelled write would prevent any status.
                await self._context.send_initial_metadata(self._headers)
                self._has_begun = True
            await self._context.write(data)
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

    def __init__(
        self, waits: ClientWaits, call: Call | None, num_bytes: int, backlog_bytes: Callable[[], int] | None
    ) -> None:
        self._waits = waits
        self._task = asyncio.current_task()
        self._slow: AntiphonError | None = None
        caller, connection = ("", "") if call is None else (call.caller, call.connection)
        if call is not None:
            call.num_unsent_bytes = num_bytes
        self._wait = Wait(Stage.ANSWER, caller, connection, self._give_up, COPIES * num_bytes, backlog_bytes)
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
