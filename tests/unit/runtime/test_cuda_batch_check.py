"""The check of a decoder step before a GPU sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from antiphon.runtime.cuda.decoder import Bounds, check_batch
from antiphon.runtime.runner import DecodeBatch
from tests.batches import SampleSettings, batch_of, sampling_of

BOUNDS = Bounds(max_rows=2, num_blocks=8, vocab_size=100, max_target_len=32, max_source_len=40, has_encoder=True)


def batch(**changes: Any) -> DecodeBatch:
    """Return a valid step: row 0 feeds three tokens from position 14 on, row 1 one token."""
    made = batch_of(
        [[5, 6, 7], [8]],
        [14, 0],
        [20, 3],
        tables=([[0, 1], [2, 99]], [[3, 4, 99], [5, 99, 99]]),
        sampling=sampling_of([2, 3], [SampleSettings(edits=[(4, 0.0, 1.0, 0.0)])] * 2),
    )
    return dataclasses.replace(made, **changes)


def test_a_valid_batch_is_accepted_and_unused_table_entries_are_not_looked_at() -> None:
    check_batch(batch(), BOUNDS)


INT32 = np.int32
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "token above": (dict(token_ids=np.array([5, 100, 7, 8])), "token_ids are 5 to 100; they must be 0 to 99"),
    "token below": (dict(token_ids=np.array([5, -1, 7, 8])), "token_ids are -1 to 8"),
    "position": (dict(positions=np.array([30, 31, 32, 0], INT32)), "positions are 0 to 32; they must be 0 to 31"),
    "offsets": (dict(offsets=np.array([0, 4, 4], INT32)), r"offsets \[0, 4, 4\] do not divide 4 tokens into 2 rows"),
    "self block": (dict(self_tables=np.array([[0, 8], [2, 9]], INT32)), "self_tables are 0 to 8; they must be 0 to 7"),
    "narrow table": (dict(self_tables=np.array([[0], [2]], INT32)), "self_tables have 1 columns; 17 positions need 2"),
    "cross block": (
        dict(cross_tables=np.array([[3, -1, 0], [5, 0, 0]], INT32)), "cross_tables are -1 to 5; they must be 0 to 7"
    ),
    "source": (dict(source_lens=np.array([41, 3], INT32)), "source_lens are 3 to 41; they must be 0 to 40"),
    "pick": (dict(sampling=sampling_of([2, 4])), "picks are 2 to 4; they must be 0 to 3"),
    "edit": (
        dict(sampling=sampling_of([2, 3], [SampleSettings(edits=[(100, 0.0, 1.0, 0.0)])] * 2)),
        "edit_ids are 100 to 100; they must be 0 to 99",
    ),
    "forced": (dict(sampling=sampling_of([2, 3], [SampleSettings(forced_id=100)] * 2)), "forced_id"),
    "edit offsets": (
        dict(sampling=dataclasses.replace(sampling_of([2, 3]), edit_offsets=np.array([0, 2, 1], INT32))),
        "must start at 0 and never fall",
    ),
    "missing edits": (
        dict(sampling=dataclasses.replace(sampling_of([2, 3]), edit_offsets=np.array([0, 1, 1], INT32))),
        "edit_offsets end at 1; there are 0 edits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused_by_name(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        check_batch(batch(**changes), BOUNDS)


def test_more_rows_than_there_are_places_for_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of the batch are 2; they must be 1 to 1"):
        check_batch(batch(), dataclasses.replace(BOUNDS, max_rows=1))
