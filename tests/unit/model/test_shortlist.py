"""Lexical shortlists: candidates of a source, and the check of their file."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import BundleError
from antiphon.text.format import TextFormat
from antiphon.text.shortlist import Shortlist

NUM_SOURCES, NUM_TARGETS = 12, 40
_SOURCES = st.integers(0, NUM_SOURCES - 1)
_TARGETS = st.integers(0, NUM_TARGETS - 1)
LISTS = st.dictionaries(_SOURCES, st.sets(_TARGETS))


def shortlist_of(lists: dict[int, set[int]], always: set[int], *, has_source_ids: bool = False) -> Shortlist:
    pairs = [(source, target) for source, targets in lists.items() for target in targets]
    return Shortlist.of_pairs(
        [source for source, _ in pairs],
        [target for _, target in pairs],
        num_sources=NUM_SOURCES,
        always=sorted(always),
        has_source_ids=has_source_ids,
    )


@given(lists=LISTS, always=st.sets(_TARGETS, min_size=1), source=st.lists(_SOURCES), has_source_ids=st.booleans())
def test_candidates_are_the_union_of_the_lists_of_a_source(
    lists: dict[int, set[int]], always: set[int], source: list[int], has_source_ids: bool
) -> None:
    expected = always.union(*(lists.get(token, set()) for token in source), source if has_source_ids else [])
    candidates = shortlist_of(lists, always, has_source_ids=has_source_ids).candidates(source)
    assert candidates.dtype == np.int32
    assert candidates.tolist() == sorted(expected)


@given(lists=LISTS, always=st.sets(_TARGETS, min_size=1), has_source_ids=st.booleans())
def test_read_returns_the_written_shortlist(
    tmp_path_factory: pytest.TempPathFactory, lists: dict[int, set[int]], always: set[int], has_source_ids: bool
) -> None:
    path = tmp_path_factory.mktemp("shortlist") / "shortlist.bin"
    written = shortlist_of(lists, always, has_source_ids=has_source_ids)
    written.write(path)
    read = Shortlist.read(path, num_sources=NUM_SOURCES, num_targets=NUM_TARGETS)
    assert read.has_source_ids == has_source_ids
    for name in ("always", "offsets", "target_ids"):
        assert np.array_equal(getattr(read, name), getattr(written, name))


def _number(index: int, value: int) -> Callable[[bytes], bytes]:
    """Return a function that replaces a number of the file after its header of 40 bytes."""

    def spoil(content: bytes) -> bytes:
        begin = 40 + 4 * index
        return content[:begin] + struct.pack("<i", value) + content[begin + 4 :]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: b"", "cannot be read as a shortlist"),
        (lambda content: content[:39], "cannot be read as a shortlist"),
        (lambda content: content[:-4], "is not a shortlist, or is damaged"),
        (lambda content: content[:-1], "is not a shortlist, or is damaged"),
        (lambda content: content + b"\0", "is not a shortlist, or is damaged"),
        (lambda content: b"x" + content[1:], "is not a shortlist, or is damaged"),
        (lambda content: content[:8] + b"\2" + content[9:], "is not a shortlist, or is damaged"),
        (lambda content: content[:16] + b"\xff" * 8 + content[24:], "is not a shortlist, or is damaged"),
        (_number(0, -1), "has the target ids -1 to 9; they must be from 0 to 39"),
        (_number(1, 40), "has the target ids 0 to 40; they must be from 0 to 39"),
        (_number(1, 0), "ids of every source must ascend"),
        (_number(2, 1), "offsets must ascend from 0 to 3"),
        (_number(3, -1), "offsets must ascend from 0 to 3"),
        (_number(14, 2), "offsets must ascend from 0 to 3"),
        (_number(15, 40), "has the target ids 6 to 40; they must be from 0 to 39"),
        (_number(17, -5), "has the target ids -5 to 6; they must be from 0 to 39"),
    ],
)
def test_read_refuses_a_damaged_file_by_name(tmp_path: Path, spoil: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "shortlist.bin"
    shortlist_of({0: {5}, 1: {6, 7}}, {0, 9}).write(path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BundleError, match=message) as error:
        Shortlist.read(path, num_sources=NUM_SOURCES, num_targets=NUM_TARGETS)
    assert str(path) in str(error.value)


def test_read_refuses_a_shortlist_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "shortlist.bin"
    shortlist_of({0: {5}}, {0}, has_source_ids=True).write(path)
    with pytest.raises(BundleError, match="lists 12 source tokens; the model has 13"):
        Shortlist.read(path, num_sources=13, num_targets=NUM_TARGETS)
    with pytest.raises(BundleError, match="adds the ids of 12 source tokens; the model has 11 targets"):
        Shortlist.read(path, num_sources=NUM_SOURCES, num_targets=11)
    with pytest.raises(BundleError, match="cannot be read as a shortlist"):
        Shortlist.read(tmp_path / "missing.bin", num_sources=NUM_SOURCES, num_targets=NUM_TARGETS)


def test_a_shortlist_is_a_file_of_the_text_format_but_not_of_the_tokenizer() -> None:
    text = TextFormat(template=("$text",), shortlist="shortlist.bin")
    assert text.files == ("tokenizer.json", "shortlist.bin")
    assert text.tokenizer_files == ("tokenizer.json",)
    assert TextFormat(template=("$text",)).files == ("tokenizer.json",)
