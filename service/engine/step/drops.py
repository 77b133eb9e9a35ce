"""Ends requests that were cancelled, or whose deadline or time limit has come."""

from __future__ import annotations

from collections.abc import Iterable

from antiphon.service.domain.cancellation import CancelCause
from antiphon.service.domain.errors import DeadlineExceeded
from antiphon.service.domain.request import FinishReason
from antiphon.service.engine.sequences.sequence import SequenceGroup, SequenceState
from antiphon.service.engine.step.endings import Endings
from antiphon.service.engine.step.parts import RunningState, StepParts
from antiphon.service.engine.step.terminal_events import time_limit_events


class Drops:
    """Ends requests early: cancelled ones without an answer, those at their time limit with their outputs so far."""

    def __init__(self, parts: StepParts, state: RunningState, endings: Endings) -> None:
        self._parts = parts
        self._state = state
        self._endings = endings

    def drop_cancelled(self) -> None:
        """End every request that was cancelled since the last call."""
        for request_id, cause in self._parts.cancellations.take():
            if (group := self._parts.live.get(request_id)) is not None:
                self._cancel(group, cause)

    def drop_expired(self) -> None:
        """End every request whose deadline or time limit has come, waiting or running."""
        now_s, state = self._parts.clock(), self._state
        late = (*self._parts.queue.expired(now_s), *state.rows.expired(now_s), *state.turns.expired(now_s))
        self._expire(dict.fromkeys(late), now_s)

    def drop_encoded(self, groups: tuple[SequenceGroup, ...]) -> None:
        """End groups that were cancelled or expired while they were encoded, before anything is decoded for them."""
        now_s, cancellations = self._parts.clock(), self._parts.cancellations
        for group in groups:
            group.encoded_s = group.encoded_s or now_s  # a preempted group keeps the time of its first encoding
        for request_id, cause in cancellations.take():
            cancelled = self._parts.live.get(request_id)
            if cancelled is not None and cancelled.state is SequenceState.ENCODING:
                self._cancel(cancelled, cause)
            else:  # the rows in use must not change during this step
                cancellations.put(request_id, cause)
        self._expire((group for group in groups if group.expires_s <= now_s), now_s)

    def _expire(self, groups: Iterable[SequenceGroup], now_s: float) -> None:
        for group in groups:
            deadline_s = group.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._miss_deadline(group)
            elif group.is_beam_search and group.state is SequenceState.RUNNING:
                self._endings.end_search(group, FinishReason.TIME_LIMIT)
            else:
                self._endings.close(group, FinishReason.TIME_LIMIT, time_limit_events(group))

    def _cancel(self, group: SequenceGroup, cause: CancelCause) -> None:
        if cause is CancelCause.DEADLINE:
            self._miss_deadline(group)
        else:
            group.cancel_cause = cause
            self._endings.refuse(group, FinishReason.CANCELLED)

    def _miss_deadline(self, group: SequenceGroup) -> None:
        error = DeadlineExceeded("the deadline passed before the answer")
        self._endings.refuse(group, FinishReason.DEADLINE, error)
