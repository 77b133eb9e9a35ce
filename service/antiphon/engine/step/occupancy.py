"""Gauges of running requests and of cache blocks."""

from __future__ import annotations

from antiphon.engine.step.parts import RunningState, StepParts


class Occupancy:
    """Reports running requests and the division of the block pool, only when they have changed."""

    def __init__(self, parts: StepParts, state: RunningState) -> None:
        self._metrics = parts.metrics
        self._pool = parts.pool
        self._state = state
        self._lanes = parts.lanes
        self._bytes_per_token = parts.runner.facts.cache_bytes_per_token
        self._reported: tuple[int, int, int] | None = None
        self.report()  # before the first request: a gauge of 0 free blocks would look like a full cache

    def report(self) -> None:
        """Set the gauges if a number has changed."""
        reservations, num_groups = self._state.reservations, self._lanes.num_groups
        current = (num_groups, self._pool.num_free, reservations.num_all_cross_blocks)
        if current != self._reported:
            self._metrics.occupied(num_groups, reservations.use(self._bytes_per_token))
            self._reported = current
