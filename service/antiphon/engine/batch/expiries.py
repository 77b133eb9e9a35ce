"""Deadlines and time limits of the rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class RowExpiries:
    """Time at which each row expires, and a lower bound of the earliest, so that most steps scan nothing.

    times_s: [max_rows], seconds on the engine's clock; infinity for a row without deadline and time limit.
    """

    def __init__(self, max_rows: int) -> None:
        self.times_s: NDArray[np.float64] = np.full(max_rows, math.inf)
        self._earliest_s = math.inf  # never later than the earliest time of a row

    def fill(self, row: int, expires_s: float) -> None:
        """Set the time of a row that starts."""
        self.times_s[row] = expires_s
        self._earliest_s = min(self._earliest_s, expires_s)

    def expired(self, num_rows: int, now_s: float) -> list[int]:
        """Return the rows, of the first num_rows, whose time has come; the last row first."""
        if now_s < self._earliest_s:  # avoids the scan; a bound that is too early costs one scan
            return []
        times_s = self.times_s[:num_rows]
        late: list[int] = np.flatnonzero(times_s <= now_s).tolist()
        self._earliest_s = float(np.min(times_s, initial=math.inf, where=times_s > now_s))
        return late[::-1]
