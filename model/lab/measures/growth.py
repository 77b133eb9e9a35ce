"""Exponent of growth: how a figure grows with a length."""

from __future__ import annotations

from collections.abc import Mapping
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
