"""Marian's lexical shortlists: both forms, where an import finds them, and how damaged ones are refused."""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import SourceError
from antiphon.importer.importer import ImportOptions, _inspect
from antiphon.text.format import TextFormat
from antiphon.text.shortlist import SHORTLIST_NAME, Shortlist
from tests.marian_models import UNTIED, checksum, write_folder, write_shortlist

NUM_FREQUENT, END = 3, 0
DECODER = {"models": ["model.npz"], "vocabs": ["vocab.source.yml", "vocab.target.yml"]}


def random_lists(num_sources: int, num_targets: int) -> dict[int, set[int]]:
    dice = random.Random(5)
    return {
        source: set(dice.sample(range(num_targets), dice.randrange(7))) for source in range(num_sources) if source % 5
    }


def imported(folder: Path, to: Path) -> tuple[TextFormat, Shortlist | None]:
    """Return the text format of an import, and the shortlist that it wrote to a new directory."""
    source = _inspect(ImportOptions(source=str(folder), target=to / "bundle"))
    to.mkdir()
    source.family.write_text(folder, source.settings, to)
    text = source.family.text(folder, source.settings, source.config)
    if text.shortlist is None:
        assert not (to / SHORTLIST_NAME).exists()
        return text, None
    sizes = {"num_sources": source.config.resolved_source_vocab_size, "num_targets": source.config.vocab_size}
    return text, Shortlist.read(to / text.shortlist, **sizes)


@pytest.mark.parametrize("changed", [{}, UNTIED], ids=["as many sources", "fewer sources"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_binary_shortlist_gives_the_candidates_of_its_lists(
    tmp_path: Path, changed: dict[str, Any], is_shared: bool
) -> None:
    """Rows of the begin token, which Marian's vocabularies do not have, have no likely tokens."""
    described, _ = write_folder(tmp_path / "model", changed)
    num_sources, num_targets = described["dim-vocabs"]
    lists = random_lists(num_sources, num_targets)
    write_shortlist(tmp_path / "model" / "lex.s2t.bin", lists, num_frequent=NUM_FREQUENT, num_sources=num_sources)
    vocabs = ["vocab.source.yml"] * 2 if is_shared else DECODER["vocabs"]
    decoder = {**DECODER, "vocabs": vocabs, "shortlist": ["/train/lex.s2t.bin", False]}
    (tmp_path / "model" / "decoder.yml").write_text(json.dumps(decoder))
    text, shortlist = imported(tmp_path / "model", tmp_path / "to")
    assert text.shortlist == SHORTLIST_NAME in text.files
    assert shortlist is not None
    for source in range(num_sources):
        expected = {END, *range(NUM_FREQUENT), *lists.get(source, ()), *([source] if is_shared else [])}
        assert shortlist.candidates([source]).tolist() == sorted(expected)


def test_text_form_keeps_the_most_likely_tokens_above_the_threshold(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", {})
    lines = [
        "w2 w5 0.5", "w3 w5 0.3", "w4 w5 0.4", "w6 w5 0.2", "w7 w9 0.05", "NULL w9 0.9", "w8 NULL 0.9", "strange w9 1",
        "w8 strange 1", "w9 w9 0.1001", "",
    ]  # fmt: skip
    content = gzip.compress("\n".join(lines).encode())
    (tmp_path / "model" / "lex.s2t.gz").write_bytes(content)
    (tmp_path / "model" / "decoder.yml").write_text(json.dumps({**DECODER, "shortlist": ["lex.s2t", 0, 3, 0.1]}))
    _, shortlist = imported(tmp_path / "model", tmp_path / "to")
    assert shortlist is not None
    assert shortlist.candidates([5]).tolist() == [END, 2, 3, 4]
    assert shortlist.candidates([9]).tolist() == [END, 9]
    assert shortlist.candidates([8]).tolist() == [END]


def _write(folder: Path, name: str) -> None:
    write_shortlist(folder / name, {2: {7}}, num_frequent=1, num_sources=60)


@pytest.mark.parametrize(
    ("names", "decoder", "is_read"),
    [
        (["lex.50.50.s2t.bin"], None, True),
        (["lex.50.50.s2t.bin"], {}, True),
        (["lex.50.50.s2t.bin", "lex.10.10.s2t.bin"], None, False),
        (["lex.50.50.s2t.bin", "lex.10.10.s2t.bin"], {"shortlist": ["lex.10.10.s2t.bin", False]}, True),
        (["lex.50.50.s2t.bin"], {"shortlist": "lex.50.50.s2t.bin"}, True),
        (["shortlist.s2t.bin"], None, False),
        ([], {"shortlist": ["lex.s2t.bin", False]}, False),
    ],
)
def test_shortlist_is_the_named_one_or_the_only_one(
    tmp_path: Path, names: list[str], decoder: dict[str, Any] | None, is_read: bool
) -> None:
    write_folder(tmp_path / "model", {})
    for name in names:
        _write(tmp_path / "model", name)
    if decoder is not None:
        (tmp_path / "model" / "decoder.yml").write_text(json.dumps({**DECODER, **decoder}))
    _, shortlist = imported(tmp_path / "model", tmp_path / "to")
    assert (shortlist is not None) == is_read
    if shortlist is not None:
        assert shortlist.candidates([2]).tolist() == [0, 7]


def _flipped(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("lex.bin", lambda content: content[:20], "is truncated: 20 bytes"),
        ("lex.bin", lambda content: content[:-1], "is damaged: 539 bytes, its header says 540"),
        ("lex.bin", lambda content: content + bytes(8), "is damaged: 548 bytes, its header says 540"),
        ("lex.bin", _flipped, "its checksum does not match"),
        ("lex.bin", lambda content: b"x" + content[1:], "is not a binary shortlist of Marian"),
        ("lex.bin", lambda content: b"", "is not a binary shortlist of Marian"),
        ("lex.bin.gz", lambda content: gzip.compress(content)[:-9], "cannot be read"),
        ("lex.s2t", lambda content: b"a b\n", "line 1 is 'a b'; expected target, source and probability"),
        ("lex.s2t", lambda content: b"w2 w3 often\n", "cannot be read as a shortlist"),
        ("lex.s2t", lambda content: b"\xff w3 0.1\n", "cannot be read as a shortlist"),
    ],
)
def test_damaged_shortlist_is_refused_with_its_name(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], message: str
) -> None:
    write_folder(tmp_path / "model", {})
    path = tmp_path / "model" / name
    _write(tmp_path / "model", name)
    path.write_bytes(spoil(path.read_bytes()))
    (tmp_path / "model" / "decoder.yml").write_text(json.dumps({**DECODER, "shortlist": [name]}))
    with pytest.raises(SourceError, match=rf"{name} .*{message}"):
        imported(tmp_path / "model", tmp_path / "to")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (7, 1 << 63, "is damaged: an offset or id is out of bounds"),
        (7, 5, "is damaged: an offset or id is out of bounds"),
        (7, 1, "is damaged: offsets must ascend from 0 to 2"),
        (66, 1, "is damaged: offsets must ascend from 0 to 2"),
        (67, 61, "has the target ids 0 to 61; they must be from 0 to 60"),
        (67, 1 << 31, "is damaged: an offset or id is out of bounds"),
    ],
)
def test_numbers_out_of_bounds_are_refused(tmp_path: Path, place: int, value: int, message: str) -> None:
    write_folder(tmp_path / "model", {})
    path = tmp_path / "model" / "lex.s2t.bin"
    write_shortlist(path, {2: {7, 8}}, num_frequent=1, num_sources=60)

    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 8 * place, value)
    struct.pack_into("<Q", content, 8, checksum(bytes(content[16:])))
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        imported(tmp_path / "model", tmp_path / "to")


def test_shortlist_of_more_sources_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", {})
    write_shortlist(tmp_path / "model" / "lex.s2t.bin", {}, num_frequent=1, num_sources=62)
    with pytest.raises(SourceError, match=r"lex\.s2t\.bin lists 62 source tokens; the model has 61"):
        imported(tmp_path / "model", tmp_path / "to")
