"""Growth of figures with a length: exponents, and the length where one figure passes another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np


def growth(points: Mapping[str, Mapping[str, Any]], figure: str) -> float:
    """Return the exponent p of the power law T^p that fits a figure best, over the longer half of the lengths T.

    points: figures by length. At small lengths constant costs hide the growth.
    """
    lengths = sorted(map(int, points))
    chosen = lengths[len(lengths) // 2 :] if len(lengths) > 3 else lengths
    values = [points[str(length)][figure] for length in chosen]
    return float(np.polyfit(np.log(chosen), np.log(values), 1)[0])


def crossing(points: Mapping[str, Mapping[str, Any]], one: str, other: str) -> float | None:
    """Return the first length at which figure `one` passes figure `other` from below; None if it never does.

    points: positive figures by length. Between two lengths both figures are taken as power laws.
    """
    lengths = sorted(map(int, points))
    gaps = [math.log(points[str(length)][one] / points[str(length)][other]) for length in lengths]
    for (start, below), (end, above) in pairwise(zip(lengths, gaps, strict=True)):
        if below <= 0 < above:
            return float(start * (end / start) ** (below / (below - above)))
    return None
