"""How fast a queue drains, and how long an answer takes then: what expected waits are made of.

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
# Answers over which their pace is smoothed.
NUM_ANSWERS = 64


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


class AnswerPace:
    """Seconds from admission to the end of an answer, by its length, smoothed. For one thread at a time."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._token_s = 0.0
        self._num_tokens = 0.0

    def answered(self, run_s: float, num_tokens: int) -> None:
        """Note an answer of so many tokens, the end token included."""
        self._num_answers = min(self._num_answers + 1, NUM_ANSWERS)
        self._token_s += (run_s / max(1, num_tokens) - self._token_s) / self._num_answers
        self._num_tokens += (num_tokens - self._num_tokens) / self._num_answers

    def seconds(self, num_tokens: int) -> float:
        """What an answer of at most so many tokens takes, and not more than a usual one; 0 without enough evidence."""
        if self._num_answers < MIN_DEPARTURES:
            return 0.0
        return self._token_s * min(num_tokens, self._num_tokens)
