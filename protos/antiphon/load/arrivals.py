"""When requests come. Open loop: they come when they come, whatever the server does."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times from 0 to `seconds`, `rate` of them a second on average, intervals exponential; at least one."""
    return list(poisson_times(rate, seconds, seed))


def poisson_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """The same one by one, for runs of hours."""
    rng = random.Random(seed)
    time_s = rng.expovariate(rate)
    yield time_s
    while (time_s := time_s + rng.expovariate(rate)) < seconds:
        yield time_s
