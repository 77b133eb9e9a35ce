"""An engine in another process: requests go there, and each of its steps comes back as one message.

Both ends are for the event loop of their process; only `FrontLink.post` is called by the engine's threads. Messages are
pickled, so an end belongs to a process of the same server: nobody else can have one (server/workers/fronts.py).
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import pickle
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from antiphon.domain.errors import AntiphonError, DeadlineExceeded, EngineFault, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import (
    ANSWERED,
    CancelCause,
    FinishReason,
    Pooling,
    Priority,
    Request,
    Task,
    TokenEvent,
)
from antiphon.engine.admission import AdmissionLimits, admit, check_ability
from antiphon.engine.engine import Engine
from antiphon.engine.kv_cache import BlockHolder
from antiphon.engine.stream import OUTPUT_BITS, Item, OutputStream, RemoteStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.runtime.runner import ModelFacts
from antiphon.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 18
# A front that does not read for so long is hung, and is killed by its supervisor. A step of 256 rows is 3 KB.
_MAX_UNSENT_BYTES = 64 << 20
_TOKENIZER = "tokenizer"


class Channel:
    """Messages over a socket, both ways. For the event loop; `send` from any thread.

    on_message: called with each message. on_end: called once, when the other end has closed its socket.
    """

    def __init__(self, end: socket.socket, on_message: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._is_closed = False
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the other end has no room for yet."""
        return len(self._unsent)

    def send(self, message: bytes) -> bool:
        """Send a message without waiting. Return False if the other end has closed its socket, or does not read."""
        data = _HEADER.pack(len(message)) + message
        with self._lock:
            if self._is_closed or len(self._unsent) > _MAX_UNSENT_BYTES:
                return False
            if self._unsent:
                self._unsent += data
                return True
            num_sent = self._sent(data)
            if num_sent < len(data):
                self._unsent += memoryview(data)[num_sent:]
                self._loop.call_soon_threadsafe(self._wait_for_room)
        return True

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()

    def _sent(self, data: bytes | bytearray) -> int:
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the end of the socket is read soon

    def _wait_for_room(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._end, self._write)

    def _write(self) -> None:
        with self._lock:
            del self._unsent[: self._sent(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._end)

    def _read(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return
        self._received += data
        start = 0
        try:
            while len(self._received) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(self._received, start)
                begin = start + _HEADER.size
                if len(self._received) < begin + size:
                    break
                start = begin + size
                self._on_message(bytes(memoryview(self._received)[begin:start]))
        finally:  # a message that cannot be handled must not be read again
            del self._received[:start]


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteModel:
    """A model of the engine's process, as the processes in front of it know it."""

    description: bytes
    """Message that clients get, pb.Model."""
    engine: EngineLimits
    """Without the budget of encoding: the facts have the longest source that it allows."""
    facts: ModelFacts
    may_run_short: bool

    @classmethod
    def of(cls, engine: Engine, description: bytes) -> Self:
        """Return what a front knows of an engine of this process."""
        limits = engine.admission
        return cls(
            description=description,
            engine=replace(limits.engine, encode_budget=None),
            facts=limits.facts,
            may_run_short=limits.may_run_short,
        )

    @property
    def limits(self) -> AdmissionLimits:
        """Limits within which a request can run."""
        return AdmissionLimits(engine=self.engine, facts=self.facts, may_run_short=self.may_run_short)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests and free blocks of an engine."""

    num_running: int
    num_waiting: int
    num_free_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalModel:
    """A model of this process, for `FrontLink`."""

    engine: Engine
    tokenizer: Tokenizer
    facts: RemoteModel


class FrontLink:
    """The engine's end: submits the requests of one front, and sends it the steps' tokens and events.

    models: returns the models of this process by name. on_end: called when the front has ended.
    """

    def __init__(
        self, end: socket.socket, models: Callable[[], Mapping[str, LocalModel]], on_end: Callable[[FrontLink], None]
    ) -> None:
        self._models = models
        self._on_end = on_end
        self._streams: dict[int, tuple[Engine, RemoteStream]] = {}
        self._channel = Channel(end, self._receive, self._ended)
        self.announce()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the front has not taken yet."""
        return self._channel.num_unsent_bytes

    def announce(self) -> None:
        """Send the facts of all models: at the beginning, and after every change."""
        self._send("models", {name: model.facts for name, model in self._models().items()})

    def report(self, loads: Mapping[str, Load]) -> None:
        """Send the load of the engines by model."""
        self._send("loads", loads)

    def post(self, addresses: bytes, items: Sequence[Item], finals: Sequence[tuple[RemoteStream, TokenEvent]]) -> bool:
        """Send the part of a step. From the engine's threads."""
        ends = []
        for stream, event in finals:
            if event.is_last:
                self._streams.pop(stream.number, None)
            ends.append((stream.number, event, stream.end_reason))
        try:
            packed: bytes | list[Item] = array("i", cast("Sequence[int]", items)).tobytes()
        except TypeError:  # some have log-probabilities
            packed = list(items)
        return self._send("step", addresses if packed else b"", packed, ends)

    def close(self) -> None:
        """Close the link."""
        self._channel.close()

    def _send(self, *message: Any) -> bool:
        return self._channel.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _receive(self, message: bytes) -> None:
        match pickle.loads(message):
            case ("submit", number, name, request):
                self._submit(number, name, request)
            case ("cancel", number, cause):
                if (found := self._streams.get(number)) is not None:
                    engine, stream = found
                    engine.give_up(stream, cause)

    def _submit(self, number: int, name: str, data: bytes) -> None:
        try:
            model = self._models().get(name)
            if model is None:
                raise Unavailable(f"model {name!r} is not served any more")
            request = _unpacked(data, model.tokenizer)
            stream = RemoteStream(request.request_id, self, number)
            self._streams[number] = (model.engine, stream)
            model.engine.submit(request, stream)
        except Exception as error:
            self._streams.pop(number, None)
            if not isinstance(error, AntiphonError):
                log.exception("a request of a front cannot be submitted")
                error = EngineFault("the engine failed")
            error.__traceback__ = None
            refusal = TokenEvent(request_id="", is_last=True, error=error)
            self._send("step", b"", b"", [(number, refusal, None)])

    def _ended(self) -> None:
        for engine, stream in list(self._streams.values()):
            engine.give_up(stream, CancelCause.LOST_LOOP)
        self._on_end(self)


_OUTPUT_MASK = (1 << OUTPUT_BITS) - 1


class EngineLink:
    """The front's end: knows the models of the engine's process, and passes its steps to the streams of requests.

    on_change: called with True when the engine's process has models, with False when it has ended.
    index: of this front among `num` of them.
    """

    def __init__(self, on_change: Callable[[bool], None], *, index: int = 0, num: int = 1) -> None:
        self.loop = asyncio.get_running_loop()
        self.loads: Mapping[str, Load] = {}
        """Load of the engines by model, at most a fraction of a second old."""
        self.request_numbers: Iterator[int] = itertools.count(index, num)
        """Numbers that no other front gives to a request."""
        self._on_change = on_change
        self._channel: Channel | None = None
        self._numbers = itertools.count()
        self._streams: dict[int, OutputStream] = {}
        self._engines: dict[int, RemoteEngine] = {}  # of the streams
        self._changed = threading.Condition()
        self._models: Mapping[str, RemoteModel] = {}

    def attach(self, end: socket.socket) -> None:
        """Use a socket to the process of the engine, or to the one that takes its place."""
        if self._channel is not None:
            self._channel.close()
            self._lost()
        self._channel = Channel(end, self._receive, self._ended)

    def model(self, name: str, timeout_s: float | None = None) -> RemoteModel | None:
        """Wait for a model of the engine's process. Return None if it is not there in time. Blocks."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._models, timeout_s)
            return self._models.get(name)

    def submit(self, engine: RemoteEngine, request: bytes, stream: OutputStream) -> None:
        """Pass a pickled request to an engine. Raises Unavailable if its process has ended."""
        stream.number = number = next(self._numbers)
        if not self._send("submit", number, engine.name, request):
            raise _lost_engine()
        self._streams[number], self._engines[number] = stream, engine

    def cancel(self, number: int, cause: CancelCause) -> bool:
        """End a request. Return False if it has ended."""
        return number in self._streams and self._send("cancel", number, cause)

    def end(self, engine: RemoteEngine | None, error: AntiphonError) -> None:
        """End the open requests of an engine with an error, without the engine; None: of all."""
        for number in [number for number, other in self._engines.items() if engine is None or other is engine]:
            event = TokenEvent(request_id="", finish_reason=FinishReason.ERROR, is_last=True, error=error)
            self._finish(number, event, FinishReason.ERROR)

    def close(self) -> None:
        """Close the link."""
        if self._channel is not None:
            self._channel.close()

    def _send(self, *message: Any) -> bool:
        return self._channel is not None and self._channel.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _receive(self, message: bytes) -> None:
        match pickle.loads(message):
            case ("step", addresses, items, finals):
                self._deliver(addresses, items, finals)
            case ("models", models):
                with self._changed:
                    self._models = models
                    self._changed.notify_all()
                self._on_change(bool(models))
            case ("loads", loads):
                self.loads = loads

    def _deliver(
        self, addresses: bytes, items: bytes | list[Item], finals: Sequence[tuple[int, TokenEvent, FinishReason | None]]
    ) -> None:
        streams = self._streams
        tokens: array[int] | list[Item] = array("i", items) if isinstance(items, bytes) else items
        for address, item in zip(array("Q", addresses), tokens, strict=True):
            if (stream := streams.get(address >> OUTPUT_BITS)) is not None:  # None: it was ended here, as by a drain
                stream.push_to(address & _OUTPUT_MASK, item)
        for number, event, end_reason in finals:
            self._finish(number, event, end_reason)

    def _finish(self, number: int, event: TokenEvent, end_reason: FinishReason | None) -> None:
        if (stream := self._streams.get(number)) is None:
            return
        event.request_id = stream.request_id
        stream.end_reason = end_reason
        if event.is_last:
            del self._streams[number]
            self._engines.pop(number).ended()
        stream.finish(event)

    def _ended(self) -> None:
        self._channel = None
        self._lost()

    def _lost(self) -> None:
        with self._changed:
            self._models = {}
        self.end(None, _lost_engine())
        self._on_change(False)


class RemoteEngine:
    """Engine of one model in another process, for a front: the methods of `Engine` that its calls need.

    For the event loop; only `drain` blocks. A refusal that depends on other requests is the last event of the stream.
    """

    def __init__(self, name: str, link: EngineLink, model: RemoteModel, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self.name = name
        self.clock: Callable[[], float] = time.monotonic
        """Clock of arrival_s and deadline_s, in seconds: one for all processes of a machine."""
        self.request_numbers = link.request_numbers
        self.is_alive = False
        self.num_blocks = model.facts.num_blocks
        self.max_num_seqs = model.engine.max_num_seqs
        self.busy_s = 0.0
        """Always 0: the process of the engine is watched there."""
        self._link = link
        self._limits = model.limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._changed = threading.Condition()
        self._num_open = 0
        self._idle = Load(num_running=0, num_waiting=0, num_free_blocks=self.num_blocks)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, of all fronts."""
        return self._load.num_waiting

    @property
    def num_running(self) -> int:
        """Requests being generated, of all fronts."""
        return self._load.num_running

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks that no request holds."""
        return self._load.num_free_blocks

    def block_holders(self) -> list[BlockHolder]:
        """Return none: the process of the engine lists them."""
        return []

    def stack(self) -> str:
        """Return no stack: the thread is in another process."""
        return "the engine is in another process\n"

    def free_idle_cache(self) -> None:
        """Do nothing: the process of the engine does it."""

    def start(self) -> None:
        """Accept requests."""
        self.is_alive = True

    def check_ability(self, task: Task, pooling: Pooling = Pooling.MEAN) -> None:
        """Raise Unsupported if the model can never do this task. Call it before the request is read."""
        check_ability(task, pooling, self._limits)

    def check_room(self, client: str, priority: Priority) -> None:
        """Accept: only the engine knows its queue."""

    def check_accepting(self) -> None:
        """Raise Unavailable before start and while draining."""
        if not self.is_alive:
            raise Unavailable("the server is starting or shutting down")

    def submit(self, request: Request, stream: OutputStream) -> None:
        """Pass on a request, whose events `stream` delivers, or refuse it with an error, as `Engine` does.

        QueueFull, and an end of the engine's process, are the last event of the stream.
        """
        admit(request, stream, self._limits)
        if request.deadline_s is not None and request.deadline_s <= self.clock():
            self._metrics.deadline_missed("submit")
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        self.check_accepting()
        self._link.submit(self, _packed(request, self._tokenizer), stream)
        with self._changed:
            self._num_open += 1

    def give_up(self, stream: OutputStream, cause: CancelCause) -> None:
        """Cancel an accepted request. If it has its answer already, count it as an answer that was not read."""
        stream.cancel_cause = cause
        if not self._link.cancel(stream.number, cause) and stream.end_reason in ANSWERED:
            self._metrics.left_unread(cause)

    def ended(self) -> None:
        """Note the end of one request."""
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait for the end of the accepted ones. Those left after the timeout end at once.

        Returns whether all finished in time. Blocks.
        """
        self.is_alive = False
        with self._changed:
            has_finished = self._changed.wait_for(lambda: self._num_open == 0, timeout_s)
            if not has_finished:  # the engine's process, which has the same time, ends them itself
                self._changed.wait_for(lambda: self._num_open == 0, _ENGINE_ENDS_S)
        self._link.loop.call_soon_threadsafe(self._link.end, self, Unavailable("the server is shutting down"))
        return has_finished

    def stop(self) -> None:
        """End every request now, with Unavailable."""
        self.drain(0.0)

    def release(self) -> None:
        """Do nothing: the process of the engine frees the memory."""

    @property
    def _load(self) -> Load:
        return self._link.loads.get(self.name, self._idle)


AnyEngine = Engine | RemoteEngine

# Time for the engine's process to end what its own drain has left over.
_ENGINE_ENDS_S = 1.0


def _lost_engine() -> AntiphonError:
    return Unavailable("the process of the engine has ended; another takes its place")


def _packed(request: Request, tokenizer: Tokenizer) -> bytes:
    """Return a request for the engine's process, which has a tokenizer of its own for the search of stop strings."""
    if request.stop_matcher is None:
        return pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file, tokenizer).dump(request)
    return file.getvalue()


def _unpacked(data: bytes, tokenizer: Tokenizer) -> Request:
    request: Request = _Unpickler(io.BytesIO(data), tokenizer).load()
    return request


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tokenizer: Tokenizer) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tokenizer = tokenizer

    def persistent_id(self, value: object) -> str | None:
        return _TOKENIZER if value is self._tokenizer else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tokenizer: Tokenizer) -> None:
        super().__init__(file)
        self._tokenizer = tokenizer

    def persistent_load(self, name: str) -> Tokenizer:
        assert name == _TOKENIZER
        return self._tokenizer
