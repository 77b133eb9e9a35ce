"""How fast a queue drains: cost that leaves it a second, measured only while somebody is left waiting.

A request that finds the server idle says nothing of what it could do, so an interval counts only where the departure
before it left others behind. Knows numbers; the clock is the caller's.
"""

from __future__ import annotations

import math

# Busy seconds over which the measurement is smoothed: long beside one answer, short beside a change of load.
TIME_CONSTANT_S = 10.0
# Busy seconds and departures below which nothing is claimed.
MIN_BUSY_S = 1.0
MIN_DEPARTURES = 8


class DrainRate:
    """An exponentially smoothed rate over busy time. For one thread at a time."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._busy_s = 0.0
        self._num_departures = 0
        self._since_s: float | None = None  # the departure that left others behind

    def left(self, cost: float, now_s: float, *, is_last: bool) -> None:
        """Note that something of a cost has left to be served; is_last: nothing waits any more."""
        if self._since_s is not None:
            elapsed_s = now_s - self._since_s
            kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
            self._cost = self._cost * kept + cost
            self._busy_s = _grown(self._busy_s, elapsed_s)
            self._num_departures += 1
        self._since_s = None if is_last else now_s

    def emptied(self) -> None:
        """Note that nothing waits any more, though nothing was served."""
        self._since_s = None

    def per_second(self, now_s: float) -> float | None:
        """Cost a second; None without enough evidence. Sinks while nothing leaves a queue that is not empty."""
        idle_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        busy_s = _grown(self._busy_s, idle_s)
        if busy_s < MIN_BUSY_S or self._num_departures < MIN_DEPARTURES:
            return None
        return self._cost * math.exp(-idle_s / TIME_CONSTANT_S) / busy_s


def _grown(busy_s: float, elapsed_s: float) -> float:
    """Smoothed busy seconds after some more of them; never above the time constant."""
    kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
    return busy_s * kept + TIME_CONSTANT_S * (1.0 - kept)
