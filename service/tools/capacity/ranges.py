"""Types of command-line numbers. A value out of range is refused with a message that contains the range."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from low to high."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r}; it must be a whole number from {low:,} to {high:,}")
        return value

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a reader of numbers above low and at most high."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value <= high:  # NaN fails it
            raise argparse.ArgumentTypeError(f"{text!r}; it must be a number above {low:,g} and at most {high:,g}")
        return value

    return read
