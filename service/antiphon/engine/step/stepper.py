"""One iteration of continuous batching: drop, schedule, encode, decode, commit, publish.

Owns the running rows and the cache blocks. Has no thread, no lock and no loop: the engine calls it from one thread,
and tests call it directly.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.domain.errors import AntiphonError
from antiphon.domain.request import CancelCause, FinishReason
from antiphon.engine.scheduling.preemption import Preemption
from antiphon.engine.sequences.sequence import SequenceGroup
from antiphon.engine.sequences.stream import Publisher
from antiphon.engine.step.decoding import Decoding, StepTokens
from antiphon.engine.step.drops import Drops
from antiphon.engine.step.empty_rows import EmptyRows
from antiphon.engine.step.endings import Endings
from antiphon.engine.step.joining import Joining
from antiphon.engine.step.occupancy import Occupancy
from antiphon.engine.step.parts import RunningState, StepParts


class Stepper:
    """Runs steps over the requests that it admits from the queue. No part refers back to its owner.

    num_failed: consecutive steps in which something failed and nothing was decoded.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._state = state = RunningState.of(parts)
        self._endings = Endings(parts, state)
        self._drops = Drops(parts, state, self._endings)
        self._joining = Joining(parts, state, self._endings, self._drops)
        self._decoding = Decoding(parts, state, self._endings)
        self._preemption = Preemption(
            state.rows,
            state.reservations,
            state.turns,
            parts.metrics,
            parts.clock,
            vacate=self._endings.vacate,
            wait=self._joining.wait_again,
        )
        self._occupancy = Occupancy(parts, state)
        self._empty_rows = EmptyRows(parts, state)
        self._publisher = Publisher()
        self.num_failed = 0

    @property
    def num_running(self) -> int:
        """Requests of this lane that hold rows."""
        return self._state.num_groups

    @property
    def has_work(self) -> bool:
        """True when a step would have work now."""
        return self._state.has_work or bool(self._parts.queue) or bool(self._parts.cancellations)

    @property
    def may_rest(self) -> bool:
        """True when this lane runs nothing, so that waiting requests that it left can start after another's step."""
        return not self._state.has_work and self._parts.lanes.is_other_running(self._state.index)

    @property
    def admitted(self) -> tuple[SequenceGroup, ...]:
        """Requests of this lane that hold rows or blocks. The engine's lock must be held."""
        return self._state.turns.admitted

    def step(self) -> None:
        """Run one step. Other lanes can step while the runner computes."""
        with self._parts.lock:
            self._step()

    def _step(self) -> None:
        state = self._state
        self._endings.has_failed = False
        self._drops.drop_cancelled()
        self._drops.drop_expired()
        state.reservations.grow(self._preemption.preempt)
        state.turns.make_room(self._preemption.pause)
        num_before = len(state.rows)
        self._joining.fill_rows()
        self._empty_rows.note()
        tokens = self._decoding.decode(num_before)
        self._empty_rows.note()
        self._occupancy.report()
        self._publish(tokens)
        self.num_failed = self.num_failed + 1 if self._endings.has_failed and not tokens.has_decoded else 0

    def end_all(self, error: Callable[[], AntiphonError]) -> None:
        """End every waiting request, and every one of this lane, at once.

        error: makes a separate error for each request, because a raised error keeps its traceback.
        """
        with self._parts.lock:
            for group in reversed(list(self._parts.live.values())):
                if group.lane in (None, self._state.index):
                    self._endings.refuse(group, FinishReason.ERROR, error())
            self._occupancy.report()
            self._publish(StepTokens())

    def _publish(self, tokens: StepTokens) -> None:
        events = self._endings.take_events()
        if tokens.items or events:
            for sink in self._publisher.publish(tokens.sinks, tokens.items, events):
                self._parts.cancellations.put(sink.request_id, CancelCause.LOST_LOOP)
