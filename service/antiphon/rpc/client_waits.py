"""Calls that wait for their own client: to send its request, or to read its answer. Each has a time limit.

A waiting call uses memory and counts towards the limit on calls in flight, and only its client decides how long it
waits. When the limit on calls or on bytes is reached, the caller with the most waiting calls loses the oldest ones of
its busiest connection, so one client cannot lock other clients out. One caller alone may have half of the bytes. Calls
are ended through callbacks.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import grpc.aio

from antiphon.domain.errors import AntiphonError, RequestTimeout, SlowReader, TooManyRpcs
from antiphon.observability.call import CallRecord
from antiphon.observability.metrics import MetricFamilies

# A call that has waited for less time than this is not ended to make room: on a busy loop it may be about to continue.
_MIN_AGE_S = 1.0
# Ends 1/16 of the limit at once, because the search looks at every waiting call.
_ROOM_SHARE = 16
COPIES = 2
"""Copies of a message that its client has not read: ours, and the one that gRPC makes."""
FLOOD_FACTOR = 1.5
"""Multiple of the limit on incomplete requests beyond which those of any age are ended: each may take much memory."""
# Time between two looks at the bytes behind unread answers, which grow while their clients do not read.
_LOOK_S = 0.25
# Delay before a client should retry a call that was ended to make room.
_RETRY_S = 1.0


class Stage(enum.Enum):
    """Reason why a call waits for its client."""

    REQUEST = "request"  # the rest of its request message
    ANSWER = "answer"  # its client to read the answer
    OPEN = "open"  # the next message of a stream that may idle


@dataclass(slots=True, eq=False)
class Wait:
    """One call that waits for its client.

    caller, connection: the client's name and the address of its connection.
    num_bytes: memory of the answer that is kept until it is read, and of its backlog as last counted.
    backlog_bytes: returns the memory of what is ready to follow that answer; None if nothing follows.
    give_up: ends the call with an error. Called in the event loop, at most once, after the wait was removed.
    """

    stage: Stage
    caller: str
    connection: str
    give_up: Callable[[AntiphonError], None]
    num_bytes: int = 0
    backlog_bytes: Callable[[], int] | None = None
    since_s: float = field(default=0.0, init=False)
    num_backlog_bytes: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Limits on waiting calls.

    request_timeout_s, answer_timeout_s: longest wait in the stages REQUEST and ANSWER.
    max_requests: maximum number of calls with an incomplete request. max_unsent_bytes: maximum memory of unread answers
        and of what waits behind them; half of it for one caller.
    """

    request_timeout_s: float
    answer_timeout_s: float
    max_requests: int
    max_unsent_bytes: int


class ClientWaits:
    """The calls of one server that wait for their clients. For the event loop.

    on_given_up: called for every call that is ended, with its stage and the cause, `timeout` or `pressure`.
    """

    def __init__(
        self,
        limits: WaitLimits,
        on_given_up: Callable[[Stage, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_given_up = on_given_up
        # The oldest first, because all waits of a stage have the same time limit.
        self._waits: dict[Stage, dict[Wait, None]] = {stage: {} for stage in Stage}
        self._timers: dict[Stage, asyncio.TimerHandle] = {}
        self._timeouts_s = {
            Stage.REQUEST: limits.request_timeout_s,
            Stage.ANSWER: limits.answer_timeout_s,
        }
        self._unsent_bytes = 0
        self._looking: asyncio.TimerHandle | None = None

    @property
    def unsent_bytes(self) -> int:
        """Memory of unread answers, and of what waits behind them."""
        return self._unsent_bytes

    @property
    def answer_timeout_s(self) -> float:
        """Longest time in seconds that an answer waits for its client."""
        return self._limits.answer_timeout_s

    def num_waiting(self, stage: Stage) -> int:
        """Return the number of calls in a stage."""
        return len(self._waits[stage])

    def begin(self, wait: Wait) -> None:
        """Record that a call waits. Ends it at once when its client already has too many waiting calls or bytes."""
        wait.since_s = self._clock()
        waits = self._waits[wait.stage]
        waits[wait] = None
        self._unsent_bytes += wait.num_bytes
        if wait.stage in self._timeouts_s and wait.stage not in self._timers:
            self._watch(wait.stage, self._timeouts_s[wait.stage])
        if wait.stage is Stage.REQUEST and len(waits) > self._limits.max_requests:
            is_flood = len(waits) > FLOOD_FACTOR * self._limits.max_requests
            self._end_requests(0.0 if is_flood else _MIN_AGE_S)
        if wait.num_bytes and self._unsent_bytes > self._limits.max_unsent_bytes:
            self._shrink(waits, self._limits.max_unsent_bytes)
        if self._looking is None and wait.stage is not Stage.OPEN:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def end(self, wait: Wait) -> bool:
        """Record that a call no longer waits. Return False if it was ended before."""
        waits = self._waits[wait.stage]
        if wait not in waits:
            return False
        del waits[wait]
        self._unsent_bytes -= wait.num_bytes
        return True

    def make_room(self, max_calls: int) -> bool:
        """End some calls that have waited for a while; return False if there are none.

        max_calls: limit on calls in flight.
        """
        return self._make_room(tuple(Stage), max(1, max_calls // _ROOM_SHARE))

    def _end_requests(self, min_age_s: float) -> None:
        """End incomplete requests of at least this age until their number is below the limit."""
        limit = self._limits.max_requests
        num_calls = self.num_waiting(Stage.REQUEST) - limit + limit // _ROOM_SHARE
        self._make_room((Stage.REQUEST,), max(1, num_calls), min_age_s)

    def _make_room(self, stages: Iterable[Stage], num_calls: int, min_age_s: float = _MIN_AGE_S) -> bool:
        latest_s = self._clock() - min_age_s
        old = [wait for stage in stages for wait in self._waits[stage] if wait.since_s <= latest_s]
        chosen = _of_largest_holder(old, lambda wait: 1)[:num_calls]
        for wait in chosen:
            self._give_up(wait, "pressure", _no_room())
        return bool(chosen)

    def _look(self) -> None:
        """Count the bytes behind unread answers, and end calls beyond a limit. Looks again while calls wait."""
        self._looking = None
        answers, requests = self._waits[Stage.ANSWER], self._waits[Stage.REQUEST]
        if len(requests) > self._limits.max_requests:
            self._end_requests(_MIN_AGE_S)
        for wait in answers:
            if wait.backlog_bytes is not None:
                num_grown = wait.backlog_bytes() - wait.num_backlog_bytes
                wait.num_backlog_bytes += num_grown
                wait.num_bytes += num_grown
                self._unsent_bytes += num_grown
        limit = self._limits.max_unsent_bytes
        if self._unsent_bytes > limit // 2:
            by_caller: defaultdict[str, list[Wait]] = defaultdict(list)
            for wait in answers:
                by_caller[wait.caller].append(wait)
            for waits in by_caller.values():
                self._shrink(waits, limit // 2)
            self._shrink(answers, limit)
        if answers or requests:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _shrink(self, waits: Iterable[Wait], limit: int) -> None:
        """End calls until their unread answers take at most a limit; the newest one alone may exceed it."""
        answers = [wait for wait in waits if wait.num_bytes]
        num_bytes = sum(wait.num_bytes for wait in answers)
        if num_bytes <= limit:
            return
        num_excess = num_bytes - limit + limit // _ROOM_SHARE
        while num_excess > 0 and len(answers) > 1:
            for wait in _of_largest_holder(answers[:-1], lambda wait: wait.num_bytes):
                self._give_up(wait, "pressure", SlowReader(f"more than {limit} bytes of answers wait to be read"))
                num_excess -= wait.num_bytes
                if num_excess <= 0:
                    return
            answers = [wait for wait in answers if wait in self._waits[Stage.ANSWER]]

    def _watch(self, stage: Stage, after_s: float) -> None:
        self._timers[stage] = asyncio.get_running_loop().call_later(after_s, self._give_up_late, stage)

    def _give_up_late(self, stage: Stage) -> None:
        """End calls whose time limit has passed, and schedule the next check."""
        del self._timers[stage]
        for wait in list(self._waits[stage]):
            left_s = wait.since_s + self._timeouts_s[stage] - self._clock()
            if left_s > 0:
                self._watch(stage, left_s)
                return
            self._give_up(wait, "timeout", self._too_late(stage))

    def _too_late(self, stage: Stage) -> AntiphonError:
        if stage is Stage.REQUEST:
            return RequestTimeout(f"no complete request came within {self._limits.request_timeout_s:g} s")
        return SlowReader(f"the client took no message for {self._limits.answer_timeout_s:g} s")

    def _give_up(self, wait: Wait, cause: str, error: AntiphonError) -> None:
        if self.end(wait):
            self._on_given_up(wait.stage, cause)
            wait.give_up(error)


def _no_room() -> AntiphonError:
    return TooManyRpcs("too many calls are in flight, and this one waited for its client", retry_after_s=_RETRY_S)


def _of_largest_holder(waits: list[Wait], weigh: Callable[[Wait], int]) -> list[Wait]:
    """Return the waits of the caller with the largest total, on its largest connection, the oldest first."""
    for name in ("caller", "connection"):
        totals: Counter[str] = Counter()
        for wait in waits:
            totals[getattr(wait, name)] += weigh(wait)
        if totals:
            largest = max(totals, key=lambda holder: totals[holder])
            waits = [wait for wait in waits if getattr(wait, name) == largest]
    return sorted(waits, key=lambda wait: wait.since_s)


class WaitMetrics:
    """The metrics of calls that wait for their clients. For the event loop."""

    def __init__(self, families: MetricFamilies) -> None:
        self._given_up = {
            (stage, cause): families.calls_given_up.labels(stage.value, cause)
            for stage in Stage
            for cause in ("timeout", "pressure")
        }
        self._families = families

    def given_up(self, stage: Stage, cause: str) -> None:
        """Count a call that was ended because its client kept it waiting."""
        self._given_up[stage, cause].inc()

    def watch(self, waits: ClientWaits) -> None:
        """Report the number of waiting calls and unsent bytes at every scrape."""
        self._families.unsent_bytes.set_function(lambda: waits.unsent_bytes)
        for stage in Stage:
            self._families.calls_waiting.labels(stage.value).set_function(partial(waits.num_waiting, stage))


class Writer:
    """Sends the messages of one request, one at a time, each within the limits of `ClientWaits`.

    record: its account. send: sends a message. begin: sends the headers before the first one; None if there are none.
    backlog_bytes: returns the memory of what is ready to follow a message.
    """

    def __init__(
        self,
        waits: ClientWaits,
        record: CallRecord,
        send: Callable[[bytes], Awaitable[None]],
        begin: Callable[[], Awaitable[None]] | None = None,
        backlog_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._waits = waits
        self._record = record
        self._send = send
        self._begin = begin
        self._backlog_bytes = backlog_bytes

    async def write(self, data: bytes) -> None:
        """Send a serialised message. Returns when the client's flow control has accepted it.

        Callers must not keep the message itself meanwhile: it takes several times the memory.

        Raises SlowReader if that takes too long or too many bytes are unread, CancelledError if the call ends first.
        Tokens that the stream collects until then go with the next message.
        """
        writing = _Writing(self._waits, self._record, len(data), self._backlog_bytes)
        try:
            if self._begin is not None:
                # Sent separately: if they waited with the first message, a cancelled write would prevent any status.
                await self._begin()
                self._begin = None
            await self._send(data)
        except asyncio.CancelledError:
            writing.raise_slow()
            raise
        except grpc.aio.InternalError:  # the client left, or its deadline passed, before the message was sent
            raise asyncio.CancelledError from None
        finally:
            writing.end()
        self._record.num_messages += 1
        self._record.num_unsent_bytes = 0

    async def write_to_the_end(self, data: bytes) -> None:
        """Send a message as `write` does. A cancellation of the task waits until the message is sent.

        For calls of many requests: an error of one ends the call, whose status can only be sent after the headers.
        """
        writing = asyncio.ensure_future(self.write(data))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.gather(writing, return_exceptions=True)
            raise


class _Writing:
    """Message that waits for its client, in the task that writes it."""

    def __init__(
        self, waits: ClientWaits, record: CallRecord, num_bytes: int, backlog_bytes: Callable[[], int] | None
    ) -> None:
        self._waits = waits
        self._task = asyncio.current_task()
        self._slow: AntiphonError | None = None
        record.num_unsent_bytes = num_bytes
        num_kept = COPIES * num_bytes
        self._wait = Wait(Stage.ANSWER, record.caller, record.connection, self._give_up, num_kept, backlog_bytes)
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
