"""Exact percentiles from all samples, without buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    return _nearest_rank(sorted(values), percent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Percentiles of values, in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


def spread_ms(seconds: Sequence[float]) -> Spread | None:
    """Return the percentiles of times in seconds; None if there are no times."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p95, p99, p99_9 = (1e3 * _nearest_rank(ordered, percent) for percent in (50, 90, 95, 99, 99.9))
    return Spread(p50=p50, p90=p90, p95=p95, p99=p99, p99_9=p99_9, max=1e3 * ordered[-1])


def _nearest_rank(ordered: Sequence[float], percent: float) -> float:
    # 99.9 is not a binary fraction: without rounding, 99.9 % of 41,000 values would be more than 40,959 of them.
    rank = math.ceil(round(len(ordered) * percent / 100, 9))
    return ordered[max(rank, 1) - 1]
