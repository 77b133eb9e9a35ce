"""Calls that wait for their own client: to send its request, or to read its answer. Each has a time limit.

A call that waits costs memory and a place among the calls in flight, and its client alone decides for how long. When
places or bytes run short, the caller with most such calls gives up the oldest ones of its busiest connection, so that
one client cannot lock the others out. Ends calls through what it is given; knows no message and no gRPC.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from antiphon.service.domain.errors import AntiphonError, RequestTimeout, SlowReader, TooManyRpcs

# A call that has waited less than this is not given up to make room: on a busy loop it may be about to go on.
_MIN_AGE_S = 1.0
# Room is made for so large a part of a limit at once: the search for it looks at every call that waits.
_ROOM_SHARE = 16
# When a client whose call was given up to make room may come again.
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
    num_bytes: of an answer that is kept until it is read.
    give_up: ends the call with an error. Called in the event loop, at most once, after the wait was taken out.
    """

    stage: Stage
    caller: str
    connection: str
    give_up: Callable[[AntiphonError], None]
    num_bytes: int = 0
    since_s: float = field(default=0.0, init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Bounds of what clients may keep waiting.

    request_timeout_s, answer_timeout_s: seconds in the stages of these names.
    max_requests: calls whose request is not complete. max_unsent_bytes: answers that are not read.
    """

    request_timeout_s: float
    answer_timeout_s: float
    max_requests: int
    max_unsent_bytes: int


class ClientWaits:
    """The calls of one server that wait for their clients. For the event loop.

    on_given_up: hears of every call that is given up, by its stage and the cause, `timeout` or `pressure`.
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
        # The oldest first, as all of a stage have the same time.
        self._waits: dict[Stage, dict[Wait, None]] = {stage: {} for stage in Stage}
        self._timers: dict[Stage, asyncio.TimerHandle] = {}
        self._timeouts_s = {
            Stage.REQUEST: limits.request_timeout_s,
            Stage.ANSWER: limits.answer_timeout_s,
        }
        self._unsent_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that are not read."""
        return self._unsent_bytes

    @property
    def answer_timeout_s(self) -> float:
        """Seconds that an answer may wait for its reader."""
        return self._limits.answer_timeout_s

    def num_waiting(self, stage: Stage) -> int:
        """Return the number of calls in a stage."""
        return len(self._waits[stage])

    def begin(self, wait: Wait) -> None:
        """Note that a call waits. It may be given up at once where its client holds too much already."""
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
        """Note that a call waits no longer. Return False where it was given up before."""
        waits = self._waits[wait.stage]
        if wait not in waits:
            return False
        del waits[wait]
        self._unsent_bytes -= wait.num_bytes
        return True

    def make_room(self, max_calls: int) -> bool:
        """Give up some calls, where any has waited for a while; max_calls: how many there may be in flight."""
        return self._make_room(tuple(Stage), max(1, max_calls // _ROOM_SHARE))

    def _make_room(self, stages: Iterable[Stage], num_wanted: int) -> bool:
        latest_s = self._clock() - _MIN_AGE_S
        old = [wait for stage in stages for wait in self._waits[stage] if wait.since_s <= latest_s]
        chosen = _of_largest_holder(old, lambda wait: 1)[:num_wanted]
        for wait in chosen:
            self._give_up(wait, "pressure", _no_room())
        return bool(chosen)

    def _make_bytes(self, newest: Wait) -> None:
        """Give up unread answers of any age until the rest is within its bound; the newest alone may be larger."""
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
        """Give up those whose time is over, and look again when the next one's will be."""
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
    """Return the waits of the connection that holds most, of the caller that holds most, the oldest first."""
    for name in ("caller", "connection"):
        held: Counter[str] = Counter()
        for wait in waits:
            held[getattr(wait, name)] += weigh(wait)
        if held:
            largest = max(held, key=lambda one: held[one])
            waits = [wait for wait in waits if getattr(wait, name) == largest]
    return sorted(waits, key=lambda wait: wait.since_s)
