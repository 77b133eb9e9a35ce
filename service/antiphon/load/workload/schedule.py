"""Schedule of a plan: its arrivals, distributed over its processes."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator

from antiphon.load.plan import Plan
from antiphon.load.workload.arrivals import poisson_times

Arrival = tuple[float, int]
"""Seconds since the start, and index of the ask in the plan."""


def arrivals_of(plan: Plan) -> Iterator[float]:
    """Return every arrival time of a plan, ascending."""
    if plan.times_s is not None:
        return iter(plan.times_s[: bisect_left(plan.times_s, plan.end_s)])
    assert plan.rate is not None
    return poisson_times(plan.rate, plan.end_s, plan.seed)


def share_of(plan: Plan, process: int) -> Iterator[Arrival]:
    """Return every n-th arrival for one of n processes. Together the processes send exactly the plan's arrivals."""
    turns = zip(arrivals_of(plan), itertools.cycle(range(len(plan.asks))), strict=False)
    return itertools.islice(turns, process, None, plan.processes)
