"""Parameters of which `make test` runs only a few. pyproject.toml and CONTRIBUTING.md explain the marks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import Any

import pytest


def marked(values: Iterable[Any], mark: str, *, but: Collection[Any]) -> list[Any]:
    """Return parameters of a test or fixture, all with the mark but those of `but`, which must be among them."""
    parameters = sorted(values) if isinstance(values, Set) else list(values)  # the same order in every process
    assert all(value in parameters for value in but), f"not all of {but} are among the parameters"
    return [value if value in but else pytest.param(value, marks=getattr(pytest.mark, mark)) for value in parameters]
