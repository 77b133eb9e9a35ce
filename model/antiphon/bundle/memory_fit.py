"""Least-squares fit of the encoder workspace: bytes = a + B * (b * T + c * T^2).

B is the number of rows, T the source length in tokens. This module only calculates; others measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from antiphon.bundle.manifest import MemoryFit

MIN_LENGTHS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Peak workspace in bytes of one encoder run of `rows` sources of `length` tokens."""

    rows: int
    length: int
    peak_bytes: int


def fit_memory(measurements: Sequence[Measurement], *, packed: bool = False) -> MemoryFit:
    """Return the fit with the least relative error and without negative coefficients.

    The error is relative, so that short sources count as much as long ones.
    packed: True for graphs with packed batches. Their workspace depends only on the number of tokens, so c = 0 and the
    fit holds for any mix of lengths.
    Raises ValueError for fewer than MIN_LENGTHS different lengths.
    """
    lengths = sorted({m.length for m in measurements})
    if len(lengths) < MIN_LENGTHS:
        raise ValueError(f"a fit needs at least {MIN_LENGTHS} different lengths; measured: {lengths}")
    a, b, c = (float(value) for value in _least_squares(measurements, packed=packed))
    return MemoryFit(
        a=a,
        b=b,
        c=c,
        residual=max(abs((a + m.rows * (b * m.length + c * m.length**2)) / m.peak_bytes - 1) for m in measurements),
        exponent=_exponent(measurements, a),
        max_len=lengths[-1],
        max_rows=max(m.rows for m in measurements),
    )


def _least_squares(measurements: Sequence[Measurement], *, packed: bool) -> np.ndarray:
    terms = np.array([[1, m.rows * m.length, m.rows * m.length**2] for m in measurements], float)
    terms /= np.array([[m.peak_bytes] for m in measurements])
    ones = np.ones(len(measurements))
    best, least = np.zeros(3), math.inf
    # Each of the three coefficients is free or zero. To try all combinations is the simplest exact method.
    for free in product((True, False), (True, False), (False,) if packed else (True, False)):
        chosen = np.flatnonzero(free)
        coefficients = np.zeros(3)
        coefficients[chosen] = np.linalg.lstsq(terms[:, chosen], ones, rcond=None)[0]
        error = float(np.square(terms @ coefficients - ones).sum())
        if (coefficients >= 0).all() and error < least:
            best, least = coefficients, error
    return best


def _exponent(measurements: Sequence[Measurement], a: float) -> float:
    """Return the slope between the two longest lengths, at the largest number of rows with both; 0 for a flat fit."""
    by_rows: dict[int, list[Measurement]] = {}
    for measurement in sorted(measurements, key=lambda m: m.length):
        by_rows.setdefault(measurement.rows, []).append(measurement)
    longest = max(m.length for m in measurements)
    rows = max(r for r, points in by_rows.items() if len(points) > 1 and points[-1].length == longest)
    short, long = by_rows[rows][-2:]
    if min(short.peak_bytes, long.peak_bytes) <= a:
        return 0.0
    return math.log((long.peak_bytes - a) / (short.peak_bytes - a)) / math.log(long.length / short.length)
