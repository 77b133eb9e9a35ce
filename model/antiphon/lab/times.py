"""Times of several runs on one machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(
    runs: Mapping[str, Callable[[], object]], num_runs: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each run by name, over `num_runs` rounds.

    A round calls every run once, so that a slow moment of the machine meets all of them. A first round is not counted,
    because first calls allocate memory and prepare kernels.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(num_runs):
        for name, run in runs.items():
            started_s = clock()
            run()
            times[name].append(clock() - started_s)
    return {name: statistics.median(values) for name, values in times.items()}
