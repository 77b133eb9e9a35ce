"""Searches for the highest rate that holds. Pure: what holds is asked of a function."""

from __future__ import annotations

import math
from collections.abc import Callable

# A bracket wider than this many doublings either way is no search any more.
_MAX_DOUBLINGS = 14


def highest_rate(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The highest rate found that holds, by bisection between `low` and `high` on a logarithmic scale.

    0 where none of the rates tried holds; `high` itself is tried only as a limit.
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
    """The highest rate found that holds, from doubling or halving `start` and then bisecting what brackets it.

    precision: how far, as a share of it, the rate found may lie below one that was seen to fail. 0 where not even
    the lowest rate tried holds; where every rate holds, the highest tried.
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
