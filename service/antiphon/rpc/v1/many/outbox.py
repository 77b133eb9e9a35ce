"""Answers of a GenerateMany call on their way to the client: everything that is ready goes into one message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from antiphon.rpc.client_waits import Writer
from antiphon.rpc.v1.many.open_request import OpenRequest
from antiphon.v1 import inference_pb2 as pb

# Size of a message above which further answers go into the next one; many clients accept at most 4 MiB.
_FULL_BYTES = 1 << 20
# Least time between messages that hold whole answers only: nobody reads along. Ten steps of a small model.
_WHOLE_WINDOW_S = 0.01


class Outbox:
    """Writes the answers of one call, one message at a time. For the event loop.

    window_s: time from one message with deltas to the next, in which answers are collected. on_answering, on_answered:
    called with each request before and after its last answer is written.
    """

    def __init__(
        self,
        writer: Writer,
        window_s: Callable[[], float],
        on_answering: Callable[[OpenRequest], None],
        on_answered: Callable[[OpenRequest], None],
    ) -> None:
        self._writer = writer
        self._window_s = window_s
        self._on_answering = on_answering
        self._on_answered = on_answered
        self._ready: deque[OpenRequest] = deque()
        self._is_closed = self._is_dropped = False
        self._changed = asyncio.Event()

    def put(self, one: OpenRequest) -> None:
        """Note that a request has answers to be written."""
        if not self._is_dropped:
            self._ready.append(one)
            self._changed.set()

    def close(self) -> None:
        """End `run` once everything is written."""
        self._is_closed = True
        self._changed.set()

    def drop(self) -> None:
        """Forget what is not written, and what comes later: the call has ended."""
        self._is_dropped = True
        self._ready.clear()

    async def run(self) -> None:
        """Write answers until `close`. Raises SlowReader if the client does not read them."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._ready:
                is_urgent = any(not one.is_whole for one in self._ready)
                next_s = loop.time() + max(self._window_s(), 0.0 if is_urgent else _WHOLE_WINDOW_S)
                await self._write_some()
                if not self._is_closed:
                    await asyncio.sleep(max(0.0, next_s - loop.time()))
            if self._is_closed:
                return

    async def _write_some(self) -> None:
        """Write one message."""
        response, answered = pb.GenerateManyResponse(), []
        num_bytes = 0
        while self._ready and num_bytes < _FULL_BYTES:
            one = self._ready.popleft()
            num_before = len(response.answers)
            if one.write_to(response):
                self._on_answering(one)
                answered.append(one)
            num_bytes += sum(answer.ByteSize() for answer in response.answers[num_before:])
        data = response.SerializeToString()
        del response  # its objects take several times the memory, and the client may not read
        if data:
            await self._write(data)
        for one in answered:
            self._on_answered(one)

    async def _write(self, data: bytes) -> None:
        writing = asyncio.ensure_future(self._writer.write(data))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # An error ends the call. Its status can only be sent after the headers: wait for this write.
            await asyncio.gather(writing, return_exceptions=True)
            raise
