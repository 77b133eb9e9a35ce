"""Streams of tokens from the engine's threads to their readers: event loops, or other processes (`remote.py`).

The engine publishes a whole step with one call into each event loop and one message to each process. A stream gives its
reader the first token at once and merges later ones, because each message costs CPU time that the model needs. Tokens
that nobody reads before the end of their output come with its terminal event, without a call in each step. Unread
tokens are packed: a client that reads nothing would otherwise keep Python objects for every number of its answer, 3 KB
for a token with 20 alternatives, where the packed numbers take 170 bytes.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, cast

from antiphon.domain.request import CancelCause, FinishReason, TokenEvent, TokenLogprob
from antiphon.engine.reader import read_when

Item = int | TokenLogprob
"""A new token: its id, or its id with log-probabilities if the request asks for them."""

# Tokens that stay objects. A reader that keeps up takes about as many at a time, so little is packed for it.
_MAX_IDS = 8
_MAX_LOGPROBS = 3  # an object with 20 alternatives takes 3 KB, packing and unpacking it 5 us
# Token id, log-probability and number of alternatives; then id and log-probability of each alternative.
_RECORD = struct.Struct("<ifH")
# Memory of an item that is not packed.
_ID_BYTES = 40
_LOGPROB_BYTES = 128
_ALTERNATIVE_BYTES = 136
# Memory of a beam in the record of a search.
_BEAM_BYTES = 152


class UnreadTokens:
    """Unread tokens of one output, oldest first. Log-probabilities are kept in float32, as messages carry them."""

    def __init__(self) -> None:
        self._newest: list[Item] = []
        self._packed_ids: array[int] = array("i")
        self._records = bytearray()

    def __len__(self) -> int:
        return len(self._packed_ids) + len(self._newest)

    @property
    def num_bytes(self) -> int:
        """Memory of the tokens."""
        packed_bytes = self._packed_ids.itemsize * len(self._packed_ids) + len(self._records)
        return packed_bytes + sum(_bytes_of_item(item) for item in self._newest)

    def push(self, item: Item) -> None:
        """Add a token."""
        self._newest.append(item)
        if len(self._newest) > (_MAX_LOGPROBS if isinstance(item, TokenLogprob) else _MAX_IDS):
            self._pack()

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Remove all tokens. Return their ids, and the log-probabilities of those that have some."""
        newest = tuple(self._newest)
        self._newest.clear()
        if TokenLogprob in map(type, newest):
            logprobs = tuple(item for item in newest if isinstance(item, TokenLogprob))
            ids = tuple(item.token_id if isinstance(item, TokenLogprob) else item for item in newest)
        else:  # as for nearly every request
            ids, logprobs = cast("tuple[int, ...]", newest), ()
        if self._packed_ids:
            ids, logprobs = (*self._packed_ids, *ids), (*_unpacked(self._records), *logprobs)
            self._packed_ids, self._records = array("i"), bytearray()
        return ids, logprobs

    def _pack(self) -> None:
        for item in self._newest:
            if isinstance(item, TokenLogprob):
                self._packed_ids.append(item.token_id)
                self._records += _packed(item)
            else:
                self._packed_ids.append(item)
        self._newest.clear()


def bytes_of_logprobs(entries: tuple[TokenLogprob, ...]) -> int:
    """Return the memory of log-probabilities as objects."""
    return sum(_LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(entry.alternatives) for entry in entries)


def _bytes_of_item(item: Item) -> int:
    return bytes_of_logprobs((item,)) if isinstance(item, TokenLogprob) else _ID_BYTES


def _packed(entry: TokenLogprob) -> bytes:
    num = len(entry.alternatives)
    numbers = chain.from_iterable(entry.alternatives)
    return struct.pack(f"<ifH{'if' * num}", entry.token_id, entry.logprob, num, *numbers)


def _unpacked(records: bytearray) -> list[TokenLogprob]:
    entries, start = [], 0
    while start < len(records):
        token_id, logprob, num = _RECORD.unpack_from(records, start)
        start += _RECORD.size
        numbers = struct.unpack_from(f"<{'if' * num}", records, start)
        start += 8 * num
        alternatives = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        entries.append(TokenLogprob(token_id, logprob, alternatives))
    return entries


class TokenSink(Protocol):
    """Receiver of the tokens of one output, where its reader is."""

    @property
    def request_id(self) -> str:
        """Request of the output."""

    @property
    def reader(self) -> Reader:
        """Event loop or process of its reader."""


class RemoteReader(Protocol):
    """Process that reads streams."""

    def post(
        self,
        addresses: bytes,
        items: SequenceABC[Item],
        finals: SequenceABC[tuple[RemoteStream, TokenEvent]],
    ) -> bool:
        """Send items[i] to the output with addresses[i], as RemoteOutput packs them, then terminal events.

        From any thread. Return False if the process has ended.
        """


Reader = asyncio.AbstractEventLoop | RemoteReader


class RequestStream:
    """Stream of a request, as the engine knows it.

    reader: event loop or process that reads it.
    end_reason: reason for which the engine ended the request. The engine's thread sets it before the end is read.
    cancel_cause: reason of the cancellation; None where the request was not cancelled.
    number: of the request between its reader's process and the engine's, if they are two.
    """

    def __init__(self, request_id: str, reader: Reader, number: int = 0) -> None:
        self.request_id = request_id
        self.reader = reader
        self.number = number
        self.end_reason: FinishReason | None = None
        self.cancel_cause: CancelCause | None = None

    def output(self, index: int) -> TokenSink:
        """Return the sink of an output."""
        raise NotImplementedError


class RemoteStream(RequestStream):
    """Stream of a request whose reader is in another process. It is the sink of the first output."""

    @property
    def address(self) -> int:
        """Address of the first output."""
        return self.number << OUTPUT_BITS

    def output(self, index: int) -> RemoteStream | RemoteOutput:
        """Return the sink of an output."""
        return self if index == 0 else RemoteOutput(self.request_id, self.reader, self.address | index)


OUTPUT_BITS = 16
"""Bits of an output's index in its address; the other bits are the number of its request."""


@dataclass(frozen=True, slots=True)
class RemoteOutput:
    """Sink of an output whose reader is in another process. address: number of the request and index of the output."""

    request_id: str
    reader: Reader
    address: int


class _Stage(enum.Enum):
    """Stage of a stream."""

    OPEN = "open"
    ENDED = "ended"  # the last event has arrived
    EXHAUSTED = "exhausted"  # the last event has been read


class OutputStream(RequestStream):
    """Token events of one request, for one reader in one event loop. It is the sink of the first output.

    A reader calls `listen` and `take`. A coroutine can iterate instead, or `collect` the last events. Tokens are sent
    at most once per `coalesce_s` seconds, but first tokens and terminal events at once. Unread tokens are kept; the
    request's limit on new tokens bounds their number.

    on_end: called with every terminal event when it arrives, read or not; None after the last.
    """

    def __init__(
        self, request_id: str, *, coalesce_s: float = 0.02, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        if coalesce_s < 0:
            raise ValueError(f"coalesce_s is {coalesce_s}; it must be 0 or more")
        self.loop = loop or asyncio.get_running_loop()
        super().__init__(request_id, self.loop)
        self.on_end: Callable[[TokenEvent], None] | None = None
        self._coalesce_s = coalesce_s
        self._pending: dict[int, UnreadTokens] = {0: UnreadTokens()}
        self._first = self._pending[0]
        self._finals: deque[TokenEvent] = deque()
        self._stage = _Stage.OPEN
        self._wants_tokens = False
        self._on_readable: Callable[[], None] | None = None
        self._is_announced = False  # on_readable was called since `listen`, or since the last `take`
        self._window: asyncio.TimerHandle | None = None  # until it ends, the reader receives no token

    @property
    def unread_bytes(self) -> int:
        """Memory of the tokens and terminal events that the reader has not taken."""
        return sum(tokens.num_bytes for tokens in self._pending.values()) + sum(map(_bytes_of, self._finals))

    def listen(self, on_readable: Callable[[], None], *, wants_tokens: bool) -> None:
        """Call on_readable once `take` has something to return; after each `take`, once more.

        wants_tokens: False calls it only when the last event has arrived.
        """
        self._on_readable = on_readable
        self._wants_tokens = wants_tokens
        self._is_announced = False

    def take(self) -> list[TokenEvent]:
        """Return the terminal events with all tokens not yet read, by index, or the event of an error alone.

        Before them come unread tokens of other outputs, merged.
        """
        finals = self._take_finals()
        tokens = []
        while self._wants_tokens and self._stage is not _Stage.EXHAUSTED and self._has_pending():
            tokens.append(self._take_tokens())
        self._is_announced = False
        return [*tokens, *finals]

    def __aiter__(self) -> OutputStream:
        return self

    def __anext__(self) -> Coroutine[Any, Any, TokenEvent]:
        """Return the next merged event of any output."""
        if self._stage is _Stage.EXHAUSTED:
            raise StopAsyncIteration
        self._wants_tokens = True
        return read_when(self._is_readable, self._arrival, self._take_next)

    def collect(self) -> Coroutine[Any, Any, tuple[TokenEvent, ...]]:
        """Wait for the end. Return the terminal event of each output, by index, with every token not yet read.

        Wakes once. After an error, returns its event alone. Raises StopAsyncIteration if the last event has been read.
        """
        if self._stage is _Stage.EXHAUSTED:
            raise StopAsyncIteration
        self._wants_tokens = False
        return read_when(self._is_ended, self._arrival, lambda: tuple(self.take()))

    def output(self, index: int) -> OutputStream | _Output:
        """Return the sink of an output."""
        return self if index == 0 else _Output(self, index)

    def push(self, item: Item) -> None:
        """Add a token of the first output; in the stream's event loop only."""
        self._first.push(item)
        if self._wants_tokens and self._window is None:
            self._wake()

    def push_to(self, output_index: int, item: Item) -> None:
        """Add a token of any output; in the stream's event loop only."""
        tokens = self._pending.get(output_index)
        if tokens is None:
            tokens = self._pending[output_index] = UnreadTokens()
        tokens.push(item)
        if self._wants_tokens and self._window is None:
            self._wake()

    def finish(self, event: TokenEvent) -> None:
        """Add a terminal event; in the stream's event loop only. Events after the last are ignored."""
        if self._stage is not _Stage.OPEN:
            return
        self._finals.append(event)
        if event.is_last:
            self._stage = _Stage.ENDED
        if self.on_end is not None:
            self.on_end(event)
        if self._wants_tokens or event.is_last:
            self._wake()
        if event.is_last:  # both refer to objects that refer to this stream: a cycle would keep them in memory
            self.on_end = self._on_readable = None

    def _has_pending(self) -> bool:
        return len(self._first) > 0 or (len(self._pending) > 1 and any(map(len, self._pending.values())))

    def _is_readable(self) -> bool:
        return bool(self._finals) or (self._window is None and self._has_pending())

    def _is_ended(self) -> bool:
        return self._stage is not _Stage.OPEN

    def _arrival(self) -> asyncio.Future[None]:
        """Return a future that is done at the next change for the reader."""
        arrival = self.loop.create_future()
        self.listen(partial(_resolve, arrival), wants_tokens=self._wants_tokens)
        return arrival

    def _wake(self) -> None:
        if self._on_readable is not None and not self._is_announced:
            self._is_announced = True
            self._on_readable()

    def _take_next(self) -> TokenEvent:
        return self._take_final() if self._finals else self._take_tokens()

    def _take_finals(self) -> list[TokenEvent]:
        if self._stage is _Stage.ENDED and self._finals[-1].error is not None:
            self._finals = deque((self._finals[-1],))
        return sorted((self._take_final() for _ in range(len(self._finals))), key=lambda e: e.output_index)

    def _take_final(self) -> TokenEvent:
        event = self._finals.popleft()
        tokens = self._pending.get(event.output_index)
        if event.is_last:
            self._end_window()
            self._stage = _Stage.EXHAUSTED
        if tokens is not None and len(tokens) > 0:
            token_ids, logprobs = tokens.take()
            event.token_ids, event.logprobs = token_ids + event.token_ids, logprobs + event.logprobs
        return event

    def _take_tokens(self) -> TokenEvent:
        index, tokens = next(pair for pair in self._pending.items() if len(pair[1]))
        token_ids, logprobs = tokens.take()
        if not self._has_pending():
            self._start_window()
        return TokenEvent(request_id=self.request_id, output_index=index, token_ids=token_ids, logprobs=logprobs)

    def _start_window(self) -> None:
        if self._coalesce_s > 0:
            self._window = self.loop.call_later(self._coalesce_s, self._end_window)

    def _end_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
        if self._wants_tokens and self._has_pending():
            self._wake()


def _resolve(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


def _bytes_of(event: TokenEvent) -> int:
    """Return the memory of what a terminal event reports, as objects; its other parts are small."""
    num_beams = sum(len(step.live) + len(step.finished) for step in event.beam_steps)
    encoder_bytes = 0 if event.encoder_outputs is None else event.encoder_outputs.values.nbytes
    token_bytes = _ID_BYTES * len(event.token_ids)
    return token_bytes + bytes_of_logprobs(event.logprobs) + _BEAM_BYTES * num_beams + encoder_bytes


@dataclass(frozen=True, slots=True)
class _Output:
    """Sink of an output after the first."""

    stream: OutputStream
    index: int

    @property
    def request_id(self) -> str:
        return self.stream.request_id

    @property
    def reader(self) -> Reader:
        return self.stream.reader

    def push(self, item: Item) -> None:
        self.stream.push_to(self.index, item)


Final = tuple[RequestStream, TokenEvent]
"""Terminal event of a stream."""


@dataclass(slots=True)
class _Part:
    """The part of one step that one reader receives: items[i] for sinks[i], then terminal events.

    positions: index of each sink among the sinks of all readers; empty if there is only one reader.
    """

    sinks: list[TokenSink]
    positions: list[int]
    finals: list[Final]
    addresses: bytes | None = None
    """Of the sinks, once another process has received some."""

    def deliver(self, items: Iterable[Item], finals: Iterable[Final]) -> None:
        """Pass the tokens and events to their streams; runs in the event loop."""
        for sink, item in zip(self.sinks, items, strict=True):
            cast("OutputStream | _Output", sink).push(item)
        for stream, event in finals:
            cast("OutputStream", stream).finish(event)


class Publisher:
    """Passes a step's tokens and terminal events from the engine's thread to the streams, one call per reader."""

    def __init__(self) -> None:
        self._sinks: SequenceABC[TokenSink] = ()
        self._parts: dict[Reader, _Part] = {}

    def publish(
        self, sinks: SequenceABC[TokenSink], items: SequenceABC[Item], finals: Iterable[Final] = ()
    ) -> list[TokenSink]:
        """Send items[i] to sinks[i], then the terminal events. Return the sinks whose reader has ended.

        The assignment of sinks to readers is kept while the caller passes the same `sinks` object.
        """
        if sinks is not self._sinks:
            self._address(sinks)
        for stream, event in finals:
            self._part_for(stream.reader).finals.append((stream, event))
        lost: list[TokenSink] = []
        for reader, part in self._parts.items():
            sent = items if len(part.sinks) == len(items) else [items[i] for i in part.positions]
            lost += _send(reader, part, sent)
        return lost

    def _address(self, sinks: SequenceABC[TokenSink]) -> None:
        self._sinks = sinks
        self._parts = {}
        readers = {sink.reader for sink in sinks}
        if len(readers) == 1:
            self._parts[readers.pop()] = _Part(list(sinks), [], [])
            return
        for position, sink in enumerate(sinks):
            part = self._part_for(sink.reader)
            part.sinks.append(sink)
            part.positions.append(position)

    def _part_for(self, reader: Reader) -> _Part:
        part = self._parts.get(reader)
        if part is None:
            part = self._parts[reader] = _Part([], [], [])
        return part


def _send(reader: Reader, part: _Part, items: SequenceABC[Item]) -> list[TokenSink]:
    """Send the part of a reader. Return its sinks if the reader has ended: they will never be read."""
    finals, part.finals = part.finals, []
    if not items and not finals:
        return []
    if not isinstance(reader, asyncio.AbstractEventLoop):
        if part.addresses is None:
            sinks = cast("list[RemoteStream | RemoteOutput]", part.sinks)
            part.addresses = array("Q", [sink.address for sink in sinks]).tobytes()
        remote_finals = cast("list[tuple[RemoteStream, TokenEvent]]", finals)
        return [] if reader.post(part.addresses, items, remote_finals) else part.sinks
    try:
        reader.call_soon_threadsafe(part.deliver, items, finals)
    except RuntimeError:  # the loop is closed
        return part.sinks
    return []
