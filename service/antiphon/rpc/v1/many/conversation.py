"""One GenerateMany call: starts its requests, cancels them, and answers each of them once to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar, cast

from antiphon.domain.cancellation import CancelCause
from antiphon.domain.errors import AntiphonError, InvalidArgument, SlowReader
from antiphon.observability.call import Call, current_call, enter_call
from antiphon.rpc.grpc_fixes.deadline import TimeLimited, remaining_s
from antiphon.rpc.middleware import Context, InFlight
from antiphon.rpc.status import forget_frames
from antiphon.rpc.v1.answers.pacing import Pacing
from antiphon.rpc.v1.answers.reading import cause_of_leaving
from antiphon.rpc.v1.many.open_request import OpenRequest
from antiphon.rpc.v1.many.outbox import Outbox
from antiphon.rpc.v1.models import Models
from antiphon.rpc.v1.requests.inputs import is_short
from antiphon.rpc.v1.submission import Submitted
from antiphon.v1 import inference_pb2 as pb

# Unanswered requests of a call. Further ones stay unread: flow control makes the client wait.
MAX_OPEN_REQUESTS = 256

_T = TypeVar("_T")


class Conversation:
    """One call and its requests. For the event loop; create it in the call's own task.

    name: method name in the metrics and the log of each request.
    """

    def __init__(self, name: str, models: Models, in_flight: InFlight, pacing: Pacing, context: Context) -> None:
        self._name = name
        self._models = models
        self._in_flight = in_flight
        self._pacing = pacing
        self._context = context
        call = current_call()
        assert call is not None
        self._call: Call = call
        self._open: set[OpenRequest] = set()
        self._by_id: dict[int, OpenRequest] = {}  # those whose last answer is not on its way
        self._reading: dict[int, asyncio.Task[None]] = {}  # long texts, read in a thread
        writer = pacing.writer(context, self._backlog_bytes)
        self._outbox = Outbox(writer, lambda: pacing.window_s, self._answering, self._answered)
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
                        for given in message.requests:
                            await self._has_room.wait()
                            await self._in_flight.turn(self._call)
                            self._begin(given, group)
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

    def _begin(self, given: pb.ManyRequest, group: asyncio.TaskGroup) -> None:
        """Start one request: a short text is read at once, a long one in a task of its own."""
        if given.id in self._by_id:
            raise InvalidArgument("requests.id", given.id, "different from those of the call's unanswered requests")
        call = self._in_flight.begin_request(self._call, self._name, f"{self._call.request_id}/{given.id}")
        one = self._by_id[given.id] = OpenRequest(given.id, given.is_whole, call)
        self._open.add(one)
        self._is_idle.clear()
        if len(self._open) >= MAX_OPEN_REQUESTS:
            self._has_room.clear()
        if is_short(given.request):
            _finished(self._ask(one, given))
        else:
            self._reading[given.id] = group.create_task(self._ask(one, given))
            self._reading[given.id].add_done_callback(lambda _: self._reading.pop(given.id, None))

    async def _ask(self, one: OpenRequest, given: pb.ManyRequest) -> None:
        """Read a request and pass it to the engine. An error becomes its answer."""
        enter_call(one.call)
        try:
            one.submitted = submitted = await self._submitted(one, given)
            submitted.stream.listen(lambda: self._outbox.put(one), wants_tokens=not one.is_whole)
        except AntiphonError as error:
            forget_frames(error)
            one.error = error
            self._outbox.put(one)
        except asyncio.CancelledError:
            self._outbox.put(one)
            raise
        finally:
            enter_call(self._call)

    async def _submitted(self, one: OpenRequest, given: pb.ManyRequest) -> Submitted:
        served = self._models.find(given.request.model)
        one.call.routed(served.name, served.metrics)
        context = self._context
        if given.HasField("timeout_millis"):
            if given.timeout_millis < 1:
                raise InvalidArgument("timeout_millis", given.timeout_millis, "at least 1")
            context = cast("Context", _Limited(self._context, given.timeout_millis / 1000))
        return await served.servicer.ask(given.request, context, is_streamed=not given.is_whole)

    def _cancel(self, ids: Any) -> None:
        for request_id in ids:
            if (one := self._by_id.get(request_id)) is not None:
                one.give_up(CancelCause.CLIENT)
            if (reading := self._reading.get(request_id)) is not None:
                reading.cancel()

    def _answering(self, one: OpenRequest) -> None:
        """Free the id of a request whose last answer is about to be written: the client may use it at once."""
        del self._by_id[one.id]

    def _answered(self, one: OpenRequest) -> None:
        """End the record of a request whose last answer was written."""
        self._open.remove(one)
        self._has_room.set()
        if not self._open:
            self._is_idle.set()
        self._in_flight.end_request(one.call)

    def _backlog_bytes(self) -> int:
        """Return the memory of the open requests."""
        return sum(one.num_bytes for one in self._open)

    def _leave(self, cause: CancelCause | None) -> None:
        """End what is unanswered when the call ends. cause: None where the client left."""
        for one in self._open:
            if (work := one.submitted) is not None:
                one.give_up(cause or cause_of_leaving(work.request, work.engine.clock()))
            one.call.code = "CANCELLED"
            self._in_flight.end_request(one.call)
        self._open.clear()
        self._by_id.clear()
        self._outbox.drop()


class _Limited(TimeLimited):
    """Context of a request with a time limit of its own."""

    def __init__(self, context: Context, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s

    def remaining_s(self) -> float:
        """Return the seconds left, of this limit or of the call's."""
        left_s = remaining_s(self._context)
        return self._timeout_s if left_s is None else min(left_s, self._timeout_s)


def _finished(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that waits for nothing, without the cost of a task."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("_T", end.value)
    coroutine.close()
    raise RuntimeError("the coroutine waits")
