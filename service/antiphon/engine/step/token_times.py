"""Metrics of the times of first tokens and of the gaps between steps. Writes metrics only."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.engine.batch import RunningRows
from antiphon.observability.metrics.engine_metrics import Metrics


class TokenTimes:
    """Times of the tokens of an engine's rows."""

    def __init__(self, rows: RunningRows, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._rows = rows
        self._metrics = metrics
        self._clock = clock
        self._last_s = 0.0

    def note(self, num_before: int) -> None:
        """Record a new token of every row. For rows from `num_before` on it is the first since they started."""
        now_s = self._clock()
        for group in (sequence.group for sequence in self._rows.sequences[num_before:]):
            if group.first_token_s is None:
                group.first_token_s = now_s
                self._metrics.first_token(now_s - group.request.arrival_s, group.request.trace_id)
            elif group.preempted_s is not None:
                self._metrics.resumed(now_s - group.preempted_s)
                group.preempted_s = None
        self._metrics.decoded(len(self._rows), num_before, now_s - self._last_s)
        self._last_s = now_s
