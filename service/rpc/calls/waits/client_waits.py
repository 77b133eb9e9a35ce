"""Calls that wait for their own client: to send its request, or to read its answer. Each has a time limit.

A waiting call uses memory and counts towards the limit on calls in flight, and only its client decides how long it
waits. When the limit on calls or on bytes is reached, the caller with the most waiting calls loses the oldest ones of
its busiest connection, so one client cannot lock the others out. Ends calls through callbacks; knows no message and no
gRPC.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from antiphon.service.domain.errors import AntiphonError, RequestTimeout, SlowReader, TooManyRpcs

# A call that has waited for less time than this is not ended to make room: on a busy loop it may be about to continue.
_MIN_AGE_S = 1.0
# Ends 1/16 of the limit at once, because the search looks at every waiting call.
_ROOM_SHARE = 16
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
    num_bytes: size of the answer that is kept until it is read.
    give_up: ends the call with an error. Called in the event loop, at most once, after the wait was removed.
    """

    stage: Stage
    caller: str
    connection: str
    give_up: Callable[[AntiphonError], None]
    num_bytes: int = 0
    since_s: float = field(default=0.0, init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Limits on waiting calls.

    request_timeout_s, answer_timeout_s: longest wait in the stages REQUEST and ANSWER.
    max_requests: maximum number of calls with an incomplete request. max_unsent_bytes: maximum bytes of unread answers.
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

    @property
    def unsent_bytes(self) -> int:
        """Bytes of unread answers."""
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
            self._make_room((Stage.REQUEST,), max(1, self._limits.max_requests // _ROOM_SHARE))
        if wait.num_bytes and self._unsent_bytes > self._limits.max_unsent_bytes:
            self._make_bytes(wait)

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

    def _make_room(self, stages: Iterable[Stage], num_wanted: int) -> bool:
        latest_s = self._clock() - _MIN_AGE_S
        old = [wait for stage in stages for wait in self._waits[stage] if wait.since_s <= latest_s]
        chosen = _of_largest_holder(old, lambda wait: 1)[:num_wanted]
        for wait in chosen:
            self._give_up(wait, "pressure", _no_room())
        return bool(chosen)

    def _make_bytes(self, newest: Wait) -> None:
        """End calls with unread answers of any age until the limit is kept; the newest answer alone may exceed it."""
        limit = self._limits.max_unsent_bytes
        wanted = limit - limit // _ROOM_SHARE
        while self._unsent_bytes > wanted:
            answers = [wait for wait in self._waits[Stage.ANSWER] if wait is not newest and wait.num_bytes]
            if not answers:
                return
            for wait in _of_largest_holder(answers, lambda one: one.num_bytes):
                self._give_up(wait, "pressure", SlowReader(f"more than {limit} bytes of answers wait to be read"))
                if self._unsent_bytes <= wanted:
                    return

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
            largest = max(totals, key=lambda one: totals[one])
            waits = [wait for wait in waits if getattr(wait, name) == largest]
    return sorted(waits, key=lambda wait: wait.since_s)
