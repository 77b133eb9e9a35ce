"""Preempts outputs, which continue later with the same tokens. Frees their blocks; does not choose the outputs."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.engine.batch import RunningRows
from antiphon.engine.reservations import Reservations
from antiphon.engine.row_budget import RowTurns
from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.observability.metrics.engine_metrics import Metrics


class Preemption:
    """Preempts single outputs and complete groups of an engine.

    vacate: frees a sequence's row. wait: puts a group without rows back into the queue.
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
        """Let one output wait for a row again. If its group has no other row, the group waits in the queue."""
        group = sequence.group
        if group.num_running_rows == 1:  # no other row needs the encoded source now
            self.preempt(group)
            return
        self._set_aside(sequence)
        self._reservations.give_back_output(sequence)
        group.pending = sorted((*group.pending, sequence), key=lambda one: one.index)
        self._turns.wait(group)

    def preempt(self, group: SequenceGroup) -> None:
        """Put a running group with one row back into the queue, and free all its blocks."""
        (sequence,) = (one for one in group.sequences if one.row is not None)
        self._set_aside(sequence)
        self._turns.left(group)
        self._reservations.give_back_preempted(group)
        self._wait(group)

    def _set_aside(self, sequence: Sequence) -> None:
        """Free a row and keep its tokens."""
        assert sequence.row is not None
        sequence.produced = self._rows.produced(sequence.row)
        self._vacate(sequence)
        sequence.group.preempted_s = self._clock()
        self._metrics.preempted()
