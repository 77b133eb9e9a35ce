"""Speed at which a queue drains, and duration of answers, for expected waits.

A request that finds the server idle does not show the server's capacity. An interval therefore counts only where other
requests were left waiting at its start. Knows numbers; the caller has the clock.
"""

from __future__ import annotations

import math

# Busy seconds over which the rate is smoothed: longer than one answer, shorter than a change of load.
TIME_CONSTANT_S = 10.0
# Busy seconds and departures below which no rate is given.
MIN_BUSY_S = 1.0
MIN_DEPARTURES = 8
# Answers over which the seconds per token are smoothed.
NUM_ANSWERS = 64


class DrainRate:
    """Exponentially smoothed rate over busy time. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._busy_s = 0.0
        self._num_departures = 0
        self._since_s: float | None = None  # time of the last departure that left others waiting

    def left(self, cost: float, now_s: float, *, is_last: bool) -> None:
        """Record that a request of this cost has left to be served. is_last: no request waits any more."""
        if self._since_s is not None:
            elapsed_s = now_s - self._since_s
            kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
            self._cost = self._cost * kept + cost
            self._busy_s = _grown(self._busy_s, elapsed_s)
            self._num_departures += 1
        self._since_s = None if is_last else now_s

    def emptied(self) -> None:
        """Record that no request waits any more, although none was served."""
        self._since_s = None

    def per_second(self, now_s: float) -> float | None:
        """Return the served cost per second; None without enough evidence. It falls while no request leaves a queue."""
        idle_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        busy_s = _grown(self._busy_s, idle_s)
        if busy_s < MIN_BUSY_S or self._num_departures < MIN_DEPARTURES:
            return None
        return self._cost * math.exp(-idle_s / TIME_CONSTANT_S) / busy_s


def _grown(busy_s: float, elapsed_s: float) -> float:
    """Return smoothed busy seconds after more of them; never above the time constant."""
    kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
    return busy_s * kept + TIME_CONSTANT_S * (1.0 - kept)


class AnswerPace:
    """Smoothed seconds from admission to the end of an answer, by its length. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._token_s = 0.0
        self._num_tokens = 0.0

    def answered(self, run_s: float, num_tokens: int) -> None:
        """Record the running time of an answer and its tokens, the end token included."""
        self._num_answers = min(self._num_answers + 1, NUM_ANSWERS)
        self._token_s += (run_s / max(1, num_tokens) - self._token_s) / self._num_answers
        self._num_tokens += (num_tokens - self._num_tokens) / self._num_answers

    def seconds(self, num_tokens: int) -> float:
        """Return the expected duration of an answer with at most num_tokens tokens; 0 without enough evidence.

        An answer is expected to be no longer than the average one.
        """
        if self._num_answers < MIN_DEPARTURES:
            return 0.0
        return self._token_s * min(num_tokens, self._num_tokens)
