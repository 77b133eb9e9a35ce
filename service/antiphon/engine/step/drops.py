"""Ends requests that were cancelled, or whose deadline or time limit has come."""

from __future__ import annotations

from collections.abc import Iterable

from antiphon.domain.errors import DeadlineExceeded
from antiphon.domain.request import CancelCause, FinishReason
from antiphon.engine.sequences.sequence import SequenceGroup, SequenceState
from antiphon.engine.step.endings import Endings
from antiphon.engine.step.parts import RunningState, StepParts
from antiphon.engine.step.terminal_events import time_limit_events


class Drops:
    """Ends requests early: cancelled ones without an answer, those at their time limit with their outputs so far."""

    def __init__(self, parts: StepParts, state: RunningState, endings: Endings) -> None:
        self._parts = parts
        self._state = state
        self._endings = endings

    def drop_cancelled(self) -> None:
        """End every request of this lane, and every waiting one, that was cancelled since the last call."""
        for request_id, cause in self._taken():
            group = self._parts.live.get(request_id)
            if group is not None and not self._passed_on(group, cause):
                self._cancel(group, cause)

    def drop_expired(self) -> None:
        """End every request whose deadline or time limit has come, waiting or running."""
        now_s, state = self._parts.clock(), self._state
        late = (*self._parts.queue.expired(now_s), *state.rows.expired(now_s), *state.turns.expired(now_s))
        self._expire(dict.fromkeys(late), now_s)

    def drop_encoded(self, groups: tuple[SequenceGroup, ...]) -> None:
        """End groups that were cancelled or expired while they were encoded, before anything is decoded for them."""
        now_s = self._parts.clock()
        for group in groups:
            group.encoded_s = group.encoded_s or now_s  # a preempted group keeps the time of its first encoding
        for request_id, cause in self._taken():
            cancelled = self._parts.live.get(request_id)
            if cancelled is None or self._passed_on(cancelled, cause):
                continue
            if cancelled.state is SequenceState.ENCODING:
                self._cancel(cancelled, cause)
            else:  # the rows in use must not change during this step
                self._state.cancellations.put(request_id, cause)
        self._expire((group for group in groups if group.expires_s <= now_s), now_s)

    def _taken(self) -> list[tuple[str, CancelCause]]:
        """Return the cancellations passed on to this lane, and those of any lane."""
        return [*self._state.cancellations.take(), *self._parts.cancellations.take()]

    def _passed_on(self, group: SequenceGroup, cause: CancelCause) -> bool:
        """Return whether the group runs in another lane, after passing its cancellation on to that lane."""
        if group.lane is None or group.lane == self._state.index:
            return False
        self._parts.lanes.states[group.lane].cancellations.put(group.request_id, cause)
        return True

    def _expire(self, groups: Iterable[SequenceGroup], now_s: float) -> None:
        for group in groups:
            deadline_s = group.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._miss_deadline(group)
            elif group.is_beam_search and group.num_running_rows:
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
