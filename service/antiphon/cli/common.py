"""Common parts of commands: exit codes, the error line, numbers of flags, tables. Imports the standard library only."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

EXIT_SOME_FAILED = 1
EXIT_USER_ERROR = 2


class CommandError(Exception):
    """The command cannot go on; the message contains the reason."""


def report_error(command: str, error: Exception | str) -> int:
    """Print why a command cannot go on, and return its exit code."""
    print(f"antiphon {command}: {error}", file=sys.stderr)
    return EXIT_USER_ERROR


def write_utf8() -> None:
    """Encode standard output as UTF-8, as texts of any language need it; the locale does not matter."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8")


def write_problem(flag: str, path: Path, error: OSError) -> str:
    """Return the message of a flag's file that cannot be written."""
    return f"{flag} {path} cannot be written: {error.strerror}"


def aligned(rows: Sequence[Sequence[str]], *, left_aligned: Collection[int] = (0,)) -> list[str]:
    """Return lines with columns of the width of their longest cell.

    left_aligned: indices of columns; the other columns are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left_aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return _at_least(0, int(text))


def _at_least(minimum: int, value: int) -> int:
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is not at least {minimum}")
    return value


def above_zero(text: str) -> float:
    """Read a number above 0. Raises ArgumentTypeError."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
