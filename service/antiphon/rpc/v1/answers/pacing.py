"""Pace of streamed messages: tokens per message, and writers with limits for slow clients. Shared by all models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio

from antiphon.rpc.client_waits import ClientWaits, Writer


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

    def writer(
        self, context: grpc.aio.ServicerContext[Any, Any], backlog_bytes: Callable[[], int] | None = None
    ) -> Writer:
        """Return the writer of the current RPC's messages. backlog_bytes: memory of what follows a message."""
        return Writer(self._waits, context, backlog_bytes)
