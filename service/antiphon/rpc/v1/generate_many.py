"""One GenerateMany call: starts its requests, cancels them, and answers each of them once to the end.

Everything that is ready goes into one message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from antiphon.domain.errors import AntiphonError, InvalidArgument, QueueFull, SlowReader
from antiphon.domain.request import CancelCause, FinishReason, TokenEvent
from antiphon.observability.call import CallRecord, log_request_id
from antiphon.rpc.client_waits import Writer
from antiphon.rpc.context import RequestContext
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.status import forget_frames, pushback_ms
from antiphon.rpc.v1.inputs import is_short
from antiphon.rpc.v1.models import Models
from antiphon.rpc.v1.responses import Answer
from antiphon.rpc.v1.streaming import Pacing, Submitted, cancel_cause
from antiphon.v1 import inference_pb2 as pb

# Unanswered requests of a call. Further ones stay unread: flow control makes the client wait.
MAX_OPEN_REQUESTS = 256
# Memory of a request with its record, without its tokens, and of a token of its source.
_REQUEST_BYTES = 8 << 10
_SOURCE_TOKEN_BYTES = 40
# Size of a message above which further answers go into the next one; many clients accept at most 4 MiB.
_FULL_BYTES = 1 << 20
# Least time between messages that hold whole answers only: nobody reads along. Ten steps of a small model.
_WHOLE_WINDOW_S = 0.01

_T = TypeVar("_T")


class Conversation:
    """One call and its requests. For the event loop.

    name: method name in the metrics and the log of each request.
    """

    def __init__(
        self, name: str, models: Models, middleware: CallMiddleware, pacing: Pacing, context: RequestContext
    ) -> None:
        self._name = name
        self._models = models
        self._middleware = middleware
        self._pacing = pacing
        self._context = context
        self._open: set[OpenRequest] = set()
        self._by_id: dict[int, OpenRequest] = {}  # those whose last answer is not on its way
        self._reads: dict[int, asyncio.Task[None]] = {}  # long texts, read in a thread
        writer = context.writer(self._backlog_bytes)
        self._outbox = Outbox(
            writer,
            lambda: pacing.window_s,
            num_open=lambda: len(self._open),
            on_answering=self._answering,
            on_answered=self._answered,
        )
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self, messages: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Answer every request. Returns when the client has ended its side and all requests are answered.

        Raises InvalidArgument for an id that is taken, SlowReader if the client does not read.
        """
        cause: CancelCause | None = CancelCause.CLIENT
        try:
            with self._pacing.stream():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._outbox.run())
                    async for message in messages:
                        self._cancel(message.cancelled_ids)
                        for request in message.requests:
                            await self._has_room.wait()
                            await self._middleware.turn(self._context)
                            self._begin(request, group)
                    await self._is_idle.wait()
                    self._outbox.close()
        except ExceptionGroup as errors:
            cause = CancelCause.SLOW_READER if isinstance(errors.exceptions[0], SlowReader) else CancelCause.CLIENT
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            cause = None
            raise
        finally:
            self._leave(cause)

    def _begin(self, message: pb.ManyRequest, group: asyncio.TaskGroup) -> None:
        """Start one request: a short text is read at once, a long one in a task of its own."""
        if message.id in self._by_id:
            raise InvalidArgument("requests.id", message.id, "different from those of the call's unanswered requests")
        request_id = f"{self._context.request_id}/{message.id}"
        record = self._middleware.begin_request(self._context.record, self._name, request_id)
        request = self._by_id[message.id] = OpenRequest(message.id, message.is_whole, record)
        self._open.add(request)
        self._is_idle.clear()
        if len(self._open) >= MAX_OPEN_REQUESTS:
            self._has_room.clear()
        if is_short(message.request):
            _finished(self._read(request, message))
        else:
            self._reads[message.id] = group.create_task(self._read(request, message))
            self._reads[message.id].add_done_callback(lambda _: self._reads.pop(message.id, None))

    async def _read(self, request: OpenRequest, message: pb.ManyRequest) -> None:
        """Read a request and pass it to the engine. An error becomes its answer."""
        log_request_id.set(request.record.request_id)
        try:
            request.submitted = submitted = await self._submitted(request, message)
            submitted.stream.listen(lambda: self._outbox.put(request), wants_tokens=not request.is_whole)
        except AntiphonError as error:
            forget_frames(error)
            request.error = error
            self._outbox.put(request)
        except asyncio.CancelledError:
            self._outbox.put(request)
            raise
        finally:
            log_request_id.set(self._context.request_id)

    async def _submitted(self, request: OpenRequest, message: pb.ManyRequest) -> Submitted:
        model = self._models.find(message.request.model)
        request.record.routed(model.name, model.metrics)
        timeout_s = None
        if message.HasField("timeout_millis"):
            if message.timeout_millis < 1:
                raise InvalidArgument("timeout_millis", message.timeout_millis, "at least 1")
            timeout_s = message.timeout_millis / 1000
        context = self._context.derive(record=request.record, timeout_s=timeout_s)
        return await model.servicer.submit(message.request, context, is_streamed=not message.is_whole)

    def _cancel(self, ids: Any) -> None:
        for request_id in ids:
            if (request := self._by_id.get(request_id)) is not None:
                request.give_up(CancelCause.CLIENT)
            if (reading := self._reads.get(request_id)) is not None:
                reading.cancel()

    def _answering(self, request: OpenRequest) -> None:
        """Free the id of a request whose last answer is about to be written: the client may use it at once."""
        del self._by_id[request.id]

    def _answered(self, request: OpenRequest) -> None:
        """End the record of a request whose last answer was written."""
        self._open.remove(request)
        self._has_room.set()
        if not self._open:
            self._is_idle.set()
        self._middleware.end_request(request.record)

    def _backlog_bytes(self) -> int:
        """Return the memory of the open requests."""
        return sum(request.num_bytes for request in self._open)

    def _leave(self, cause: CancelCause | None) -> None:
        """End what is unanswered when the call ends. cause: None where the client left."""
        for request in self._open:
            if (work := request.submitted) is not None:
                request.give_up(cause or cancel_cause(work.request, work.engine.clock()))
            request.record.code = "CANCELLED"
            self._middleware.end_request(request.record)
        self._open.clear()
        self._by_id.clear()
        self._outbox.drop()


def _finished(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that waits for nothing, without the cost of a task."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("_T", end.value)
    coroutine.close()
    raise RuntimeError("the coroutine waits")


class Cancelled(AntiphonError):
    """The client cancelled one request of a call."""

    status = AntiphonError.status.CANCELLED
    reason = "CANCELLED"


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Unanswered request of a call: its stream in the engine, and its answers as messages."""

    id: int
    is_whole: bool
    record: CallRecord
    """Account of this request."""
    submitted: Submitted | None = None
    """None until the engine has accepted the request."""
    error: AntiphonError | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the request and of its unread answer."""
        if (work := self.submitted) is None:
            return _REQUEST_BYTES
        return _REQUEST_BYTES + _SOURCE_TOKEN_BYTES * work.request.num_source_tokens + work.stream.unread_bytes

    def write_to(self, response: pb.GenerateManyResponse) -> bool:
        """Add the answers that it has now. Return whether its last answer is among them."""
        if self.error is not None or self.submitted is None:
            return self._fail(response, self.error or Cancelled("the request was cancelled"))
        events = self.submitted.stream.take()
        try:
            return self._add(response, self.submitted.answer, events)
        except AntiphonError as error:
            return self._fail(response, error)

    def give_up(self, cause: CancelCause) -> None:
        """Cancel its work. If it has its answer already, it counts as one that was not read."""
        if self.submitted is not None:
            self.submitted.engine.give_up(self.submitted.stream, cause)

    def _add(self, response: pb.GenerateManyResponse, answer: Answer, events: list[TokenEvent]) -> bool:
        for event in events:
            if event.finish_reason is FinishReason.CANCELLED and event.error is None:
                raise Cancelled("the client cancelled the request")
        if self.is_whole:
            response.answers.add(id=self.id, whole=answer.whole(events))
        else:
            for event in events:
                if (delta := answer.delta(event)) is not None:
                    response.answers.add(id=self.id, delta=delta)
        is_last = self.is_whole or any(event.is_last for event in events)
        if is_last:
            self.record.code = "OK"
        return is_last

    def _fail(self, response: pb.GenerateManyResponse, error: AntiphonError) -> bool:
        forget_frames(error)
        self.record.code, self.record.error = error.status.name, error
        response.answers.add(id=self.id, failure=_failure(error))
        return True


def _failure(error: AntiphonError) -> pb.Failure:
    failure = pb.Failure(code=grpc.StatusCode[error.status.name].value[0], message=str(error), reason=error.reason)
    if isinstance(error, InvalidArgument):
        failure.field = error.field
    if isinstance(error, QueueFull):
        delay = Duration()
        delay.FromMilliseconds(pushback_ms(error))
        failure.retry_after.CopyFrom(delay)
    return failure


class Outbox:
    """Writes the answers of one call, one message at a time. For the event loop.

    window_s: time from one message with deltas to the next, in which answers are collected. num_open: requests whose
    last answer is not written. on_answering, on_answered: called with each request before and after its last answer is
    written.
    """

    def __init__(
        self,
        writer: Writer,
        window_s: Callable[[], float],
        *,
        num_open: Callable[[], int],
        on_answering: Callable[[OpenRequest], None],
        on_answered: Callable[[OpenRequest], None],
    ) -> None:
        self._writer = writer
        self._window_s = window_s
        self._num_open = num_open
        self._on_answering = on_answering
        self._on_answered = on_answered
        self._ready: deque[OpenRequest] = deque()
        self._is_closed = self._is_dropped = False
        self._changed = asyncio.Event()
        self._is_complete = asyncio.Event()  # no other request could add a whole answer to the next message

    def put(self, request: OpenRequest) -> None:
        """Note that a request has answers to be written."""
        if self._is_dropped:
            return
        self._ready.append(request)
        self._changed.set()
        self._note_complete()

    def close(self) -> None:
        """End `run` once everything is written."""
        self._is_closed = True
        self._changed.set()
        self._is_complete.set()

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
                is_urgent = any(not request.is_whole for request in self._ready)
                next_s = loop.time() + max(self._window_s(), 0.0 if is_urgent else _WHOLE_WINDOW_S)
                self._is_complete.clear()
                await self._write_some()
                self._note_complete()
                if not self._is_closed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(next_s):
                            await self._is_complete.wait()
            if self._is_closed:
                return

    def _note_complete(self) -> None:
        if self._ready and self._ready[-1].is_whole and len(self._ready) >= self._num_open():
            self._is_complete.set()

    async def _write_some(self) -> None:
        """Write one message."""
        response, answered = pb.GenerateManyResponse(), []
        num_bytes = 0
        while self._ready and num_bytes < _FULL_BYTES:
            request = self._ready.popleft()
            num_before = len(response.answers)
            if request.write_to(response):
                self._on_answering(request)
                answered.append(request)
            num_bytes += sum(answer.ByteSize() for answer in response.answers[num_before:])
        data = response.SerializeToString()
        del response  # its objects take several times the memory, and the client may not read
        if data:
            await self._writer.write_to_the_end(data)
        for request in answered:
            self._on_answered(request)
