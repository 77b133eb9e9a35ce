"""The way out: tokens leave the engine's thread and reach the event loop of whoever waits for them.

The engine publishes a whole step with one call into each event loop. A stream hands its reader the first token at
once and merges later ones, because each message costs CPU that the model needs. Knows ids, not text and not protobuf.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

from antiphon.service.request import TokenEvent


class OutputStream:
    """Token events of one request, for one reader in one event loop.

    Iterating yields at most one message per `coalesce_s` seconds, the first token and the terminal event at once.
    Unread tokens are kept, at most as many as the request may generate.
    """

    def __init__(
        self, request_id: str, *, coalesce_s: float = 0.02, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        if coalesce_s < 0:
            raise ValueError(f"coalesce_s is {coalesce_s}; it must be 0 or more")
        self.request_id = request_id
        self.loop = loop or asyncio.get_running_loop()
        self._coalesce_s = coalesce_s
        self._pending: list[int] = []
        self._num_tokens = 0
        self._final: TokenEvent | None = None
        self._is_exhausted = False
        self._is_due = True  # the coalescing window is over: a token may leave
        self._wants_tokens = False
        self._reader: asyncio.Future[None] | None = None
        self._window: asyncio.TimerHandle | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next merged event; the last one carries the finish reason."""
        if self._is_exhausted:
            raise StopAsyncIteration
        self._wants_tokens = True
        while self._final is None and not (self._pending and self._is_due):
            await self._wait()
        return self._take()

    async def collect(self) -> TokenEvent:
        """Wait for the end and return every token not yet read in one terminal event; wakes once.

        Raises StopAsyncIteration when the terminal event has been read already.
        """
        if self._is_exhausted:
            raise StopAsyncIteration
        self._wants_tokens = False
        while self._final is None:
            await self._wait()
        return self._take()

    def push(self, token_id: int) -> None:
        """Add a token; in the stream's event loop only."""
        self._pending.append(token_id)
        if self._reader is not None and self._wants_tokens and self._is_due:
            self._wake()

    def finish(self, event: TokenEvent) -> None:
        """Add the terminal event; in the stream's event loop only. What comes after the first is ignored."""
        if self._final is None:
            self._final = event
            self._wake()

    async def _wait(self) -> None:
        self._reader = self.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _take(self) -> TokenEvent:
        token_ids = tuple(self._pending)
        self._pending.clear()
        self._num_tokens += len(token_ids)
        if self._final is not None:
            self._end_window()
            self._is_exhausted = True
            return dataclasses.replace(self._final, token_ids=token_ids)
        self._start_window()
        return TokenEvent(request_id=self.request_id, token_ids=token_ids, num_generated=self._num_tokens)

    def _start_window(self) -> None:
        if self._coalesce_s > 0:
            self._is_due = False
            self._window = self.loop.call_later(self._coalesce_s, self._end_window)

    def _end_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
        self._is_due = True
        if self._pending and self._wants_tokens:
            self._wake()


@dataclasses.dataclass(slots=True)
class _Parcel:
    """What one event loop gets of one step: token_ids[i] for streams[i], then terminal events.

    positions: of its streams among those of all loops; left empty for the only loop.
    """

    streams: list[OutputStream]
    positions: list[int]
    finals: list[tuple[OutputStream, TokenEvent]]

    def deliver(self, token_ids: Iterable[int], finals: Iterable[tuple[OutputStream, TokenEvent]]) -> None:
        """Hand over; runs in the event loop."""
        for stream, token_id in zip(self.streams, token_ids, strict=True):
            stream.push(token_id)
        for stream, event in finals:
            stream.finish(event)


class Publisher:
    """Carries a step's tokens and terminal events from the engine's thread to the streams, one call per event loop."""

    def __init__(self) -> None:
        self._streams: SequenceABC[OutputStream] = ()
        self._parcels: dict[asyncio.AbstractEventLoop, _Parcel] = {}

    def publish(
        self,
        streams: SequenceABC[OutputStream],
        token_ids: list[int],
        finals: Iterable[tuple[OutputStream, TokenEvent]] = (),
    ) -> list[OutputStream]:
        """Send token_ids[i] to streams[i], then the terminal events; returns the streams whose loop is closed.

        How streams are spread over loops is remembered for as long as the same `streams` object comes.
        """
        if streams is not self._streams:
            self._address(streams)
        for stream, event in finals:
            self._parcel(stream.loop).finals.append((stream, event))
        lost: list[OutputStream] = []
        for loop, parcel in self._parcels.items():
            tokens = token_ids if len(parcel.streams) == len(token_ids) else [token_ids[i] for i in parcel.positions]
            lost += _send(loop, parcel, tokens)
        return lost

    def _address(self, streams: SequenceABC[OutputStream]) -> None:
        self._streams = streams
        self._parcels = {}
        loops = {stream.loop for stream in streams}
        if len(loops) == 1:
            self._parcels[loops.pop()] = _Parcel(list(streams), [], [])
            return
        for position, stream in enumerate(streams):
            parcel = self._parcel(stream.loop)
            parcel.streams.append(stream)
            parcel.positions.append(position)

    def _parcel(self, loop: asyncio.AbstractEventLoop) -> _Parcel:
        parcel = self._parcels.get(loop)
        if parcel is None:
            parcel = self._parcels[loop] = _Parcel([], [], [])
        return parcel


def _send(loop: asyncio.AbstractEventLoop, parcel: _Parcel, token_ids: list[int]) -> list[OutputStream]:
    finals, parcel.finals = parcel.finals, []
    if not token_ids and not finals:
        return []
    try:
        loop.call_soon_threadsafe(parcel.deliver, token_ids, finals)
    except RuntimeError:  # the loop is closed: nobody will ever read these streams
        return parcel.streams
    return []
