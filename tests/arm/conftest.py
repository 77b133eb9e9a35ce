"""Skips all tests of this folder where the tools are missing."""

from __future__ import annotations

import pytest

from tests.arm.emulator import LIBRARY


@pytest.fixture(autouse=True, scope="session")
def library() -> None:
    """Skip tests unless `make arm-tools` could unpack its programs, and the library was compiled."""
    if not LIBRARY.exists():
        pytest.skip("no library for 64-bit Arm: run `make test-arm`")
