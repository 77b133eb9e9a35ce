"""Numbers of a command line, and the error for what cannot be used. A message contains the allowed range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from antiphon.domain.limits import ALLOWED, DEFAULT_LIMITS, Allowed


class CapacityError(Exception):
    """Capacity cannot be planned; the message names the flag or file, and the allowed values."""


def add_limit_flag(group: argparse._ArgumentGroup, name: str, *, help_text: str) -> None:
    """Add the flag of an engine limit, with the server's default and allowed values."""
    flag, default = f"--{name.replace('_', '-')}", getattr(DEFAULT_LIMITS, name)
    group.add_argument(flag, type=_limit(ALLOWED[name]), default=default, metavar="N", help=help_text)


def _limit(allowed: Allowed) -> Callable[[str], float]:
    """Return a reader of the values of a limit."""

    def read(text: str) -> float:
        try:
            value = int(text) if allowed.is_whole else float(text)
        except ValueError:
            value = math.nan
        if not allowed.holds(value):
            kind = "a whole number" if allowed.is_whole else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}; it must be {kind} from {allowed.low:,} to {allowed.high:,}")
        return value

    return read


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
