"""Speed of one replica by its number of running requests: measured points, and interpolation between them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from antiphon.tools.capacity.replicas import CapacityError

MAX_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceCurve:
    """Answers per second by number of running requests, from 1 on. Constant beyond the last point.

    rows, answers_per_s: the measured points, in order of rows. work: evenly spaced quantiles of the work of an answer,
    relative to the mean. origin: machine and method of the measurement.
    """

    rows: tuple[int, ...]
    answers_per_s: tuple[float, ...]
    work: tuple[float, ...]
    origin: str

    @property
    def highest_per_s(self) -> float:
        """Return the highest number of answers per second of one replica."""
        return max(self.answers_per_s)

    def at(self, num_rows: int) -> float:
        """Return answers per second with num_rows running requests, interpolated linearly between two points."""
        if num_rows <= self.rows[0]:
            return self.answers_per_s[0] * num_rows / self.rows[0]
        points = zip(self.rows, self.answers_per_s, strict=True)
        for (low, low_per_s), (high, high_per_s) in pairwise(points):
            if num_rows <= high:
                return low_per_s + (high_per_s - low_per_s) * (num_rows - low) / (high - low)
        return self.answers_per_s[-1]


def read_curve(path: Path) -> ServiceCurve:
    """Read a curve that measure_curve.py wrote. Raises CapacityError, which names the file and the field."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CapacityError(f"--curve {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CapacityError(f"--curve {path} is not an object of rows, answers_per_s, work")
    rows, per_s = _numbers(found, "rows", path), _numbers(found, "answers_per_s", path)
    work = _numbers(found, "work", path)
    if len(rows) != len(per_s):
        raise CapacityError(f"--curve {path}: answers_per_s has {len(per_s)} entries; rows has {len(rows)}")
    if any(low >= high for low, high in pairwise(rows)) or any(row != int(row) or row > MAX_ROWS for row in rows):
        raise CapacityError(f"--curve {path}: rows must rise, whole numbers from 1 to {MAX_ROWS:,}")
    mean = sum(work) / len(work)
    return ServiceCurve(
        rows=tuple(map(int, rows)),
        answers_per_s=tuple(per_s),
        work=tuple(value / mean for value in work),
        origin=str(found.get("origin", path.name)),
    )


def _numbers(found: dict[str, Any], name: str, path: Path) -> Sequence[float]:
    values = found.get(name)
    is_list = isinstance(values, list) and values
    if not is_list or any(not _is_positive(value) for value in values or ()):
        raise CapacityError(f"--curve {path}: {name} must be a list of numbers above 0")
    assert values is not None
    return [float(value) for value in values]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
