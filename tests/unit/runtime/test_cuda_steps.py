"""Sizes and layouts of steps on a GPU, and the conversion of their elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.runtime.cuda.decoder import candidate_bucket, power_of_two, row_bucket
from antiphon.runtime.cuda.runner import as_elements
from antiphon.runtime.cuda.step_buffers import EDITS, StepSizes, edit_rounds, input_layout, result_layout
from tests.batches import SampleSettings, sampling_of

SIZES = StepSizes(tokens=7, rows=3, samples=5, edits=9, candidates=2, self_width=4, cross_width=6)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_bucket_holds_its_rows_and_never_exceeds_the_limit(num_rows: int, max_rows: int) -> None:
    num_rows = min(num_rows, max_rows)
    assert num_rows <= row_bucket(num_rows, max_rows) <= max_rows


def test_there_are_few_buckets_and_small_ones_waste_little() -> None:
    buckets = [row_bucket(rows, 256) for rows in range(1, 257)]
    assert len(set(buckets)) <= 16
    assert buckets == sorted(buckets)
    assert all(bucket < 2 * rows for rows, bucket in enumerate(buckets, 1))


@given(st.integers(0, 5000))
def test_candidates_and_powers_are_large_enough(count: int) -> None:
    assert candidate_bucket(count) >= max(count, 1)
    assert power_of_two(count) >= count
    assert power_of_two(count).bit_count() == 1


def test_arrays_of_a_layout_are_aligned_and_do_not_overlap() -> None:
    for layout in (input_layout(SIZES), result_layout(SIZES)):
        end = 0
        for _, place in layout:
            assert place.offset % 256 == 0
            assert place.offset >= end
            end = place.end
        assert end <= layout.num_bytes
    assert list(input_layout(SIZES).places)[-3:] == list(EDITS)


def test_views_of_a_layout_share_its_memory() -> None:
    layout = input_layout(SIZES)
    memory = np.zeros(layout.num_bytes, np.uint8)
    layout.views(memory)["self_tables"][2, 3] = 0x01020304
    place = layout.places["self_tables"]
    assert memory[place.offset : place.end][-4:].tolist() == [4, 3, 2, 1]


def test_a_layout_without_an_encoder_has_no_cross_arrays() -> None:
    places = input_layout(StepSizes(**{**dict.fromkeys(StepSizes.__slots__, 2), "cross_width": 0})).places
    assert not {"cross_lens", "cross_tables"} & set(places)


def test_sizes_are_joined_and_compared() -> None:
    larger = SIZES.joined(StepSizes(**dict.fromkeys(StepSizes.__slots__, 5)))
    assert larger.holds(SIZES)
    assert not SIZES.holds(larger)
    assert (larger.tokens, larger.rows, larger.edits) == (7, 5, 9)


def test_edits_of_one_token_are_in_rounds_in_their_order() -> None:
    first = SampleSettings(edits=[(4, 0, 1, 0), (9, 0, 1, 0), (4, 1, 1, 0), (4, 2, 1, 0)])
    second = SampleSettings(edits=[(4, 0, 1, 0), (9, 0, 1, 0)])
    assert edit_rounds(sampling_of([0, 1], [first, second])).tolist() == [0, 0, 1, 2, 0, 0]
    assert edit_rounds(sampling_of([0], [second])).tolist() == [0, 0]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float32"])
def test_elements_equal_those_of_pytorch(precision: str) -> None:
    random = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    halfway = torch.tensor([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256])  # between two numbers of bfloat16
    values = torch.cat([random, halfway])
    elements = as_elements(values.numpy(), precision)  # type: ignore[arg-type]
    expected = values.to(getattr(torch, precision))
    assert elements.tobytes() == expected.view(torch.uint8).numpy().tobytes()
