"""When requests come. Open loop: they come when they come, whatever the server does."""

from __future__ import annotations

import random


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times from 0 to `seconds`, `rate` of them a second on average, intervals exponential; at least one."""
    rng = random.Random(seed)
    times = [rng.expovariate(rate)]
    while (later_s := times[-1] + rng.expovariate(rate)) < seconds:
        times.append(later_s)
    return times
