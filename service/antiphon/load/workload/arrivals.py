"""Arrival times of requests in open loop: they do not depend on the server."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return Poisson arrival times from 0 to `seconds`, on average `rate` per second; at least one."""
    return list(poisson_times(rate, seconds, seed))


def poisson_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of `poisson_arrivals` one by one, for runs of hours."""
    rng = random.Random(seed)
    time_s = rng.expovariate(rate)
    yield time_s
    while (time_s := time_s + rng.expovariate(rate)) < seconds:
        yield time_s
