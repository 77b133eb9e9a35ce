"""A small exported model for the tests of sessions, runner and profile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from antiphon.bundle.manifest import Bundle, load_bundle
from tests.parity.exports import shared_export

LONGEST = 512
# Heads of width 4, which the pool rounds up to 16, targets of up to three blocks, and no table that limits positions.
# Four heads, so that a matrix [H, T, T] outweighs the rest of an eager encoder's workspace.
TINY: dict[str, object] = dict(
    d_model=16, num_heads=4, d_ff=16, positions="none", max_source_len=LONGEST, max_target_len=40
)


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    return shared_export("tiny-graphs", TINY, precisions=("float32",), explain=False)


@pytest.fixture
def own_bundle(bundle: Bundle, tmp_path: Path) -> Bundle:
    """Return a copy, which a test may change."""
    return load_bundle(shutil.copytree(bundle.path, tmp_path / "tiny"))
