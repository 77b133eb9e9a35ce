"""Marks of tests that only `make test-all` runs. pyproject.toml and CONTRIBUTING.md explain them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import Any

import pytest

combinations = pytest.mark.combinations
hardship = pytest.mark.hardship
pages = pytest.mark.pages
programs = pytest.mark.programs
training = pytest.mark.training


def mostly(mark: pytest.MarkDecorator, values: Iterable[Any], *, but: Collection[Any]) -> list[Any]:
    """Return parameters of a test or fixture, each marked but those that `make test` runs too. They must exist."""
    listed = sorted(values) if isinstance(values, Set) else list(values)  # the same order in every process
    assert all(value in listed for value in but), f"not all of {but} are among the parameters"
    return [value if value in but else pytest.param(value, marks=mark) for value in listed]
