"""Takes rows from outputs that go on later with the same tokens. Frees their blocks; decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.service.engine.batch.rows import RunningRows
from antiphon.service.engine.cache.reservations import Reservations
from antiphon.service.engine.scheduling.row_turns import RowTurns
from antiphon.service.engine.sequence import Sequence, SequenceGroup
from antiphon.service.observability.metrics import Metrics


class Preemption:
    """Preempts single outputs and whole groups of an engine.

    vacate: takes a sequence's row away. wait: puts a group without rows back into the queue.
    """

    def __init__(
        self,
        rows: RunningRows,
        reservations: Reservations,
        turns: RowTurns,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        vacate: Callable[[Sequence], None],
        wait: Callable[[SequenceGroup], None],
    ) -> None:
        self._rows = rows
        self._reservations = reservations
        self._turns = turns
        self._metrics = metrics
        self._clock = clock
        self._vacate = vacate
        self._wait = wait

    def pause(self, sequence: Sequence) -> None:
        """Let one output wait for a row again; its group waits in the queue if this was its last one."""
        group = sequence.group
        if group.num_running_rows == 1:  # nothing else needs the encoded source now
            self.preempt(group)
            return
        self._set_aside(sequence)
        self._reservations.give_back_output(sequence)
        group.pending = sorted((*group.pending, sequence), key=lambda one: one.index)
        self._turns.wait(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Let a running group with one row wait in the queue again, all its blocks free."""
        (sequence,) = (one for one in group.sequences if one.row is not None)
        self._set_aside(sequence)
        self._turns.forget(group)
        self._reservations.yield_all(group)
        self._wait(group)

    def _set_aside(self, sequence: Sequence) -> None:
        """Vacate a row and keep its tokens."""
        assert sequence.row is not None
        sequence.produced = self._rows.produced(sequence.row)
        self._vacate(sequence)
        sequence.group.preempted_s = self._clock()
        self._metrics.preempted()
