"""Sizes of the tests: small in CI, full if a make target sets the variables."""

from __future__ import annotations

import os

PREFIX = "ANTIPHON_RELIABILITY_"


def size(name: str, short: int) -> int:
    """Return a count, or whole seconds, from ANTIPHON_RELIABILITY_<name>, or `short` if that is not set."""
    return int(os.environ.get(PREFIX + name, short))
