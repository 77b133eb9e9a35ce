"""Search for the highest rate that holds. Pure: a function decides whether a rate holds."""

from __future__ import annotations

import math
from collections.abc import Callable

# Maximum number of doublings or halvings from the start rate.
_MAX_DOUBLINGS = 14


def highest_rate(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return the highest rate found that holds, by bisection between `low` and `high` on a logarithmic scale.

    Returns 0 if none of the tried rates holds. `high` itself is not tried.
    """
    best = 0.0
    for _ in range(steps):
        rate = math.sqrt(low * high)
        if holds(rate):
            best = low = rate
        else:
            high = rate
    return best


def bracketed_rate(holds: Callable[[float], bool], start: float, precision: float) -> float:
    """Return the highest rate found that holds: doubles or halves `start` to find a bracket, then bisects it.

    precision: maximum relative distance between the returned rate and a rate that failed. Returns 0 if even the lowest
    tried rate fails, and the highest tried rate if every rate holds.
    """
    passed, failed = (start, None) if holds(start) else (None, start)
    for _ in range(_MAX_DOUBLINGS):
        if passed is not None and failed is not None:
            break
        if failed is None:
            assert passed is not None
            passed, failed = (2 * passed, None) if holds(2 * passed) else (passed, 2 * passed)
        else:
            passed, failed = (failed / 2, failed) if holds(failed / 2) else (None, failed / 2)
    if passed is None or failed is None:
        return passed or 0.0
    steps = math.ceil(math.log2(math.log(failed / passed) / math.log1p(precision)))
    return highest_rate(holds, passed, failed, steps) or passed
