"""The native step of beam searches against NumPy, and against tokens read back through block tables."""

from __future__ import annotations

from tests.parity.beam_steps import check


def test_random_steps_choose_as_numpy_and_share_blocks_without_losing_a_token() -> None:
    assert sum(check(seed) for seed in range(200)) > 1_000
