"""Segmenters without another library (words, bytes), templates, token tables and lower bounds of lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from antiphon.errors import TokenizerError
from antiphon.text.format import LanguageIds, TextFormat, UnknownLanguageError, fill, language_id, num_before
from antiphon.text.segmenters import Backend as BackendSegmenter
from antiphon.text.segmenters import Bytes, Segmenter, WholeTokens, Words
from antiphon.text.token_table import IncrementalDecoder, Strips, table_of
from antiphon.text.tokenizer import open_tokenizer

WORDS = ["<blank>", "<s>", "</s>", "<unk>", "a", "b", "\u00e9", "@@c"]
BYTES = Bytes(3, {"<extra_id_0>": 259})


def write_words(folder: Path, words: list[str], name: str = "words.txt") -> TextFormat:
    (folder / name).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return TextFormat(kind="words", source=name, special_ids=(0, 1, 2), template=("$text", 2))


def test_words_are_looked_up_between_spaces_and_joined_by_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, write_words(tmp_path, WORDS))
    found = tokenizer.encode_source("  a \u00e9\tzzz\n@@c ")
    assert found.ids == [4, 6, 3, 7] == tokenizer.encode("  a \u00e9\tzzz\n@@c ")
    assert found.offsets == [(2, 3), (4, 5), (6, 9), (10, 13)]
    assert tokenizer.decode([1, 4, 6, 0, 7, 2]) == "a \u00e9 @@c"
    assert [tokenizer.piece(index) for index in (2, 4)] == ["</s>", " a"]


def test_words_of_source_and_target_have_separate_ids(tmp_path: Path) -> None:
    write_words(tmp_path, [*WORDS[:4], "x", "y"], "targets.txt")
    text = write_words(tmp_path, WORDS).model_copy(update=dict(target="targets.txt"))
    tokenizer = open_tokenizer(tmp_path, text)
    assert (tokenizer.encode("a b"), tokenizer.encode_target("y x")) == ([4, 5], [5, 4])
    assert (tokenizer.decode([4, 5]), tokenizer.decode_source([4, 5])) == ("x y", "a b")
    assert (tokenizer.piece(4), tokenizer.source_piece(4)) == (" x", " a")
    assert tokenizer.vocab_size == 6


def test_words_are_refused_without_an_unknown_token(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"words\.txt: the vocabulary has no <unk>"):
        open_tokenizer(tmp_path, write_words(tmp_path, ["a", "b"]))


@given(st.text(max_size=30))
def test_bytes_are_those_of_utf8_at_their_characters(text: str) -> None:
    found = BYTES.encode(text)
    assert found.ids == BYTES.ids(text) == [3 + byte for byte in text.encode()]
    assert [start for start, _ in found.offsets] == [place for place, char in enumerate(text) for _ in char.encode()]


def test_bytes_that_form_no_character_are_omitted(tmp_path: Path) -> None:
    text = TextFormat(kind="bytes", source=None, id_offset=3, special_ids=(0, 1, 2), template=("$text", 1))
    tokenizer = open_tokenizer(tmp_path, text)
    assert tokenizer.decode([3 + byte for byte in b"a\xe2\x82b\xff\xe2\x82\xac"]) == "ab\u20ac"


def test_typed_tokens_are_whole_and_the_longest_wins() -> None:
    typed = WholeTokens({"<a>": 1, "<a>b": 2})
    assert list(typed.split("x<a>b<a><a")) == [(0, "x", None), (1, "<a>b", 2), (5, "<a>", 1), (8, "<a", None)]
    assert list(WholeTokens({}).split("")) == []


def whole_words() -> BackendSegmenter:
    """Return a segmenter in which every word becomes one unknown token."""
    backend = Backend(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return BackendSegmenter(backend)


@pytest.mark.parametrize("segmenter", [BYTES, Words({"a": 1}, 0), whole_words()], ids=["bytes", "words", "backend"])
@pytest.mark.parametrize("text", ["", "a", " ", "a b " * 30, "<extra_id_0>" * 9, "wort " * 30_000, "x" * 60_000])
def test_min_tokens_is_a_lower_bound_of_the_tokens(segmenter: Segmenter, text: str) -> None:
    assert segmenter.min_tokens(text) <= len(segmenter.ids(text))


def test_min_tokens_of_a_long_text_counts_its_words() -> None:
    assert all(segmenter.min_tokens("wort " * 30_000) > 3000 for segmenter in (BYTES, Words({}, 0), whole_words()))


@pytest.mark.parametrize(
    ("strips", "expected"),
    [("nothing", "  a  b "), ("one space", " a  b "), ("leading spaces", "a  b "), ("white space", "a  b")],
)
def test_white_space_at_the_ends_is_removed_for_any_deltas(strips: Strips, expected: str) -> None:
    table = table_of({" ": 0, "a": 1, "b": 2, "<s>": 3}.items(), str.encode, {3}, strips=strips)
    ids = [3, 0, 0, 1, 0, 0, 2, 3, 0]
    assert table.decode(ids) == expected
    stream = IncrementalDecoder(table)
    assert "".join([*(stream.push([index]) for index in ids), stream.finish()]) == expected


LANGUAGES = TextFormat(
    template=(7, "$source_language", "$text", 2, "$target_language"),
    pair_template=(7, "$text", 2, "$pair", 2),
    pair_start=3,
    languages={"en": 50, "de": 51},
    default_source_language="en",
)


def test_template_inserts_languages_and_drops_absent_ones() -> None:
    assert fill(LANGUAGES, [8, 9], None, LanguageIds(50, 51)) == ((7, 50, 8, 9, 2, 51), (0,) * 6)
    assert fill(LANGUAGES, [8, 9])[0] == (7, 8, 9, 2)
    assert (num_before(LANGUAGES), num_before(LANGUAGES, LanguageIds(50, None))) == (1, 2)


def test_template_of_pairs_gives_the_second_its_type() -> None:
    assert fill(LANGUAGES, [8, 9], [10]) == ((7, 8, 9, 2, 10, 2), (0, 0, 0, 0, 1, 1))
    assert fill(LANGUAGES, [8], []) == ((7, 8, 2, 2), (0, 0, 0, 1))
    with pytest.raises(ValueError, match="single texts only"):
        fill(LANGUAGES.model_copy(update=dict(pair_template=None)), [8], [9])


@pytest.mark.parametrize("ids", [[8], [7, 50, 8], [8, 2, 51], [7, 50, 8, 2, 51]])
def test_partly_filled_ids_keep_tokens_of_the_template(ids: list[int]) -> None:
    languages = LanguageIds(50, 51)
    assert fill(LANGUAGES, ids, None, languages, is_partly_filled=True)[0] == (7, 50, 8, 2, 51)


@pytest.mark.parametrize("ids", [[7, 8], [50, 8], [8, 2], [8, 51]])
def test_ids_with_a_part_of_the_template_are_ordinary_ids(ids: list[int]) -> None:
    filled, _ = fill(LANGUAGES, ids, None, LanguageIds(50, 51), is_partly_filled=True)
    assert filled == (7, 50, *ids, 2, 51)


def test_unknown_language_error_lists_known_languages() -> None:
    assert [language_id(LANGUAGES, code, "en") for code in ("", "de")] == [50, 51]
    with pytest.raises(UnknownLanguageError, match="one of de, en"):
        language_id(LANGUAGES, "fr", None)
    many = LANGUAGES.model_copy(update=dict(languages={f"l{index:03}": index for index in range(100)}))
    with pytest.raises(UnknownLanguageError, match="l029 and 70 more"):
        language_id(many, "fr", None)
