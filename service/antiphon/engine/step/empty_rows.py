"""Metric of the time for which rows stand empty although requests wait."""

from __future__ import annotations

from antiphon.engine.step.parts import RunningState, StepParts


class EmptyRows:
    """Adds up the time of the rows that one lane may fill and does not, while its runner computes or its step ends."""

    def __init__(self, parts: StepParts, state: RunningState) -> None:
        self._metrics = parts.metrics
        self._queue = parts.queue
        self._clock = parts.clock
        self._turns = state.turns
        self._num_empty = 0
        self._since_s = 0.0

    def note(self) -> None:
        """Count the time since the last call for the rows that were empty then, and look at the rows again."""
        num_before, since_s = self._num_empty, self._since_s
        self._num_empty, self._since_s = self._turns.num_free if self._queue else 0, self._clock()
        if num_before:
            self._metrics.rows_stood_empty(num_before * (self._since_s - since_s))
