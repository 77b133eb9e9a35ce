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
    held, failed = (start, None) if holds(start) else (None, start)
    for _ in range(_MAX_DOUBLINGS):
        if held is not None and failed is not None:
            break
        if failed is None:
            assert held is not None
            held, failed = (2 * held, None) if holds(2 * held) else (held, 2 * held)
        else:
            held, failed = (failed / 2, failed) if holds(failed / 2) else (None, failed / 2)
    if held is None or failed is None:
        return held or 0.0
    steps = math.ceil(math.log2(math.log(failed / held) / math.log1p(precision)))
    return highest_rate(holds, held, failed, steps) or held
