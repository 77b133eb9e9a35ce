"""Packed sources: lengths, places, tables, types and passes; and memory of reserved arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.runtime import encoder as packed_sources
from antiphon.runtime.native import free, reserve
from antiphon.server.machine import ResidentMemory

LIMIT = 100


@given(st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=20))
def test_passes_are_bounded_and_cover_every_source(lengths: list[int]) -> None:
    parts = packed_sources.parts_of(lengths, LIMIT)
    assert [length for part in parts for length in lengths[part]] == lengths
    assert all(sum(lengths[part]) <= LIMIT or len(lengths[part]) == 1 for part in parts)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_positions_start_again_at_every_source(lengths: list[int]) -> None:
    offsets, positions = packed_sources.offsets_of(lengths), packed_sources.positions_of(lengths)
    assert positions.tolist() == [position for length in lengths for position in range(length)]
    assert np.diff(offsets).tolist() == lengths


def test_types_are_zero_for_sources_without_types() -> None:
    lengths = [2, 3, 1]
    assert packed_sources.types_of([(1, 1), (), (2,)], lengths).tolist() == [1, 1, 0, 0, 0, 2]
    assert packed_sources.types_of((), lengths).tolist() == [0] * 6


def test_tables_are_padded_with_zeros() -> None:
    tables = np.full((2, 3), 9, np.int32)
    packed_sources.fill_tables(tables, [[3], [4, 5]])
    assert tables.tolist() == [[3, 0, 0], [4, 5, 0]]


@pytest.mark.parametrize("sources", [[], [[]], [[1] * 5]])
def test_lengths_out_of_range_are_refused(sources: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"source lengths are .*; each must be 1 to 4"):
        packed_sources.checked_lengths(sources, 4)


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sources of \[17\] tokens cannot fill tables of \[1\] blocks"):
        packed_sources.check_table_lens([[0]], [17])


NUM_BYTES = 256 << 20


def test_freed_array_is_zero_again_and_takes_no_memory() -> None:
    resident = ResidentMemory()
    array = reserve((2, NUM_BYTES // 8), np.dtype("float32"), "a test")
    neighbour = np.ones(1000, np.float32)
    empty = resident.num_bytes()
    array.fill(1.0)
    assert resident.num_bytes() - empty > NUM_BYTES // 2
    free(array)
    assert resident.num_bytes() - empty < NUM_BYTES // 2
    assert not array[:, ::1000].any()
    array[1, -1] = 2.0
    assert array[1, -1] == 2.0
    free(neighbour)  # not reserved: unchanged
    assert neighbour.all()
