"""Traffic of a day: the request rate at every moment, and request times sampled from it."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.tools.capacity.flags import CapacityError

DAY_S = 86_400.0
MINUTE_S = 60.0
# Hour, width in hours and height of each bell curve; share of the peak at night.
_BELLS = ((11.0, 4.0, 1.0), (20.0, 3.0, 0.9))
_NIGHT = 0.15

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Requests per second in consecutive intervals of interval_s."""

    rates: Floats
    interval_s: float

    @property
    def duration_s(self) -> float:
        """Return the total duration in seconds."""
        return len(self.rates) * self.interval_s

    @property
    def peak_per_s(self) -> float:
        """Return the highest rate."""
        return float(self.rates.max())

    def at(self, time_s: float) -> float:
        """Return requests per second at a moment."""
        return float(self.rates[min(int(time_s / self.interval_s), len(self.rates) - 1)])

    def arrivals(self, start_s: float, end_s: float, rng: np.random.Generator) -> Floats:
        """Sample request times between two moments, in order, from a Poisson process with the rate of each moment."""
        edges = np.arange(math.floor(start_s / self.interval_s) + 1, math.ceil(end_s / self.interval_s))
        bounds = [start_s, *(edges * self.interval_s), end_s]
        parts = [rng.uniform(low, high, rng.poisson(self.at(low) * (high - low))) for low, high in pairwise(bounds)]
        return np.sort(np.concatenate(parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Burst: from start_s on, the rate is multiplied by factor for length_s seconds."""

    start_s: float
    length_s: float
    factor: float


def steady(rate_per_s: float) -> Traffic:
    """Return a day with a constant rate."""
    return Traffic(rates=np.full(int(DAY_S / MINUTE_S), rate_per_s), interval_s=MINUTE_S)


def day(peak_per_s: float, *, noise: float, burst: Burst | None, seed: int) -> Traffic:
    """Return a day of users in one time zone, by the minute: low at night, with peaks at 11 and 20 o'clock.

    peak_per_s: rate of the busiest minute without noise and burst. noise: standard deviation of the rate's logarithm;
    its autocorrelation time is about ten minutes.
    """
    minutes = np.arange(0, DAY_S, MINUTE_S)
    hours = minutes / 3600
    # Two bell curves on a constant base: the working day around 11, the evening around 20.
    shape = np.sum([height * np.exp(-(((hours - at) / width) ** 2)) for at, width, height in _BELLS], axis=0)
    shape = _NIGHT + (1 - _NIGHT) * shape / np.max(shape)
    rates = peak_per_s * shape * np.exp(_autoregressive_noise(len(minutes), noise, seed))
    if burst is not None:
        rates = (
            np.where((minutes >= burst.start_s) & (minutes < burst.start_s + burst.length_s), burst.factor, 1) * rates
        )
    return Traffic(rates=rates, interval_s=MINUTE_S)


def _autoregressive_noise(count: int, deviation: float, seed: int) -> Floats:
    """Return a stationary first-order autoregressive sequence with coefficient 0.9."""
    rng, kept = np.random.default_rng(seed), 0.9
    steps = rng.normal(0, deviation * math.sqrt(1 - kept**2), count)
    values = np.empty(count)
    values[0] = rng.normal(0, deviation)
    for index in range(1, count):
        values[index] = kept * values[index - 1] + steps[index]
    return values


def read_traffic(path: Path) -> Traffic:
    """Read a CSV of time_s and requests_per_s, at even intervals. Raises CapacityError, which names the line."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = [(float(row["time_s"]), float(row["requests_per_s"])) for row in csv.DictReader(stream)]
    except (OSError, UnicodeDecodeError) as error:
        raise CapacityError(f"--traffic {path} cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CapacityError(
            f"--traffic {path}: it must have columns of numbers, time_s, requests_per_s: {error}"
        ) from None
    return _checked(path, rows)


def _checked(path: Path, rows: Sequence[tuple[float, float]]) -> Traffic:
    if len(rows) < 2:
        raise CapacityError(f"--traffic {path} has {len(rows)} lines; it must have at least 2")
    interval_s = rows[1][0] - rows[0][0]
    for number, (before, row) in enumerate(pairwise(rows), start=3):
        if not (row[0] > before[0] and math.isclose(row[0] - before[0], interval_s, rel_tol=1e-6)):
            raise CapacityError(
                f"--traffic {path}, line {number}: time_s must rise by {interval_s:g}, as in the first lines"
            )
    rates = np.array([rate for _, rate in rows])
    if not (np.isfinite(rates).all() and rates.min() >= 0 and 0 < rates.max() <= 1e6):
        raise CapacityError(f"--traffic {path}: requests_per_s must be from 0 to 1,000,000, and not all 0")
    return Traffic(rates=rates, interval_s=interval_s)
