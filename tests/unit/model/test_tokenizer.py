"""Tokenizers of subwords, words and bytes; templates, token tables and lower bounds of lengths."""

import re
import time
import unicodedata
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
from antiphon.text.tokenizer import MASK_TOKEN, SPECIAL_TOKENS, Tokenizer, encoder_format, open_tokenizer

SENTENCES = ["The weather is nice today.", "Größe, Übung, Straße!", "I don't know 12 of them."] * 4
TOKENIZER = Tokenizer.train(SENTENCES, vocab_size=340)
AWKWARD = [
    "",
    " ",
    "a",
    " \n\tb  c ",
    "e\u0301",
    "👩‍👩‍👧 naïve",
    "שלום",
    "</s><pad>",
    "\x00",
    "\u2028x",
    "x" * 500,
    "ﬁ",
]


def expected_normal_form(text: str) -> str:
    """Return the normal form that the docstring of subwords.py describes, computed without the library."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@pytest.mark.parametrize("text", AWKWARD)
def test_decode_returns_the_normalised_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == TOKENIZER.normalize(text)


@pytest.mark.parametrize("text", [t for t in AWKWARD if t.isprintable() or t == " \n\tb  c "])
def test_normalisation_is_nfc_and_single_spaces(text: str) -> None:
    assert TOKENIZER.normalize(text) == expected_normal_form(text)


@given(st.text(max_size=60))
def test_decode_inverts_encode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == TOKENIZER.normalize(text)


@given(st.text(max_size=60))
def test_min_tokens_is_a_lower_bound_of_encode(text: str) -> None:
    assert TOKENIZER.min_tokens(text) <= len(TOKENIZER.encode(text))


def test_min_tokens_grows_with_the_text_and_not_with_its_spaces() -> None:
    assert TOKENIZER.min_tokens("x" * 20_000) == pytest.approx(2 * TOKENIZER.min_tokens("x" * 10_000), abs=1)
    assert TOKENIZER.min_tokens("a" + " " * 10_000 + "b") == TOKENIZER.min_tokens("a b")


@pytest.mark.parametrize("text", ["\u1112\u1161\u11ab", "\u037e", "\u1fef", "\u212a", "\u1fbe\u0308\u0301"])
def test_min_tokens_is_a_lower_bound_when_normalisation_shortens_a_text(text: str) -> None:
    assert len(unicodedata.normalize("NFC", text).encode()) < len(text.encode())
    repeated = text * 3000
    assert 0 < TOKENIZER.min_tokens(repeated) <= len(TOKENIZER.encode(repeated))


def test_min_tokens_of_combining_marks_takes_time_in_proportion_to_the_text() -> None:
    """Regression: sorting marks took quadratic time under the interpreter lock: 0.6 s for 64 KiB, 10 s for 256 KiB."""

    def cpu_s(num_bytes: int) -> float:
        text = "a" + "\u0301\u0316" * (num_bytes // 4)
        start_s = time.process_time()
        TOKENIZER.min_tokens(text)
        return time.process_time() - start_s

    assert cpu_s(256 * 1024) < 8 * cpu_s(64 * 1024) + 1


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_streamed_deltas_join_to_the_whole_text(ids: list[int], sizes: list[int]) -> None:
    """Random ids, split anywhere, with invalid UTF-8, special tokens and split characters."""
    stream, deltas, rest = TOKENIZER.stream(), [], list(ids)
    for size in sizes:
        deltas.append(stream.push(rest[:size]))
        rest = rest[size:]
    deltas += [stream.push(rest), stream.finish()]
    assert "".join(deltas) == TOKENIZER.decode(ids)


def test_stream_holds_back_half_a_character() -> None:
    ids = TOKENIZER.encode("🎼")
    assert len(ids) > 1, "the character must be split between tokens for this to test anything"
    stream = TOKENIZER.stream()
    assert [stream.push([index]) for index in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.push(ids[-1:]) == "🎼"


@pytest.mark.parametrize("text", ["I don't know", "Straße 12", "🎼 ä"])
def test_pieces_show_the_text_or_bytes_of_each_token(text: str) -> None:
    """A piece is the token's text; a part of a character is shown as its bytes."""
    ids = TOKENIZER.encode(text)
    shown = b"".join(
        bytes.fromhex(piece.replace("<0x", "").replace(">", "")) if piece.startswith("<0x") else piece.encode()
        for piece in map(TOKENIZER.piece, ids)
    )
    assert shown == TOKENIZER.bytes_of(ids) == f" {text}".encode()


def test_pieces_of_special_tokens_are_their_names() -> None:
    specials = (TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.unk_id)
    assert tuple(map(TOKENIZER.piece, specials)) == SPECIAL_TOKENS


def test_special_tokens_typed_by_a_user_are_text() -> None:
    specials = {TOKENIZER.pad_id, TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.unk_id}
    assert not specials & set(TOKENIZER.encode("</s> <s> <pad> <unk>"))


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.vocab_size == TOKENIZER.vocab_size
    assert [loaded.encode(text) for text in AWKWARD] == [TOKENIZER.encode(text) for text in AWKWARD]
    assert loaded.encode_batch(AWKWARD) == [TOKENIZER.encode(text) for text in AWKWARD]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe"])
def test_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Backend(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "日": 4})).save(str(path))
    with pytest.raises(TokenizerError, match="byte-level"):
        Tokenizer.load(path)


MASKED = Tokenizer.train(SENTENCES, vocab_size=340, extra_special=[MASK_TOKEN])


def test_mask_token_decodes_to_no_text(tmp_path: Path) -> None:
    MASKED.save(tmp_path / "tokenizer.json")
    masked = Tokenizer.load(tmp_path / "tokenizer.json")
    assert masked.mask_id == len(SPECIAL_TOKENS)
    assert masked.decode([masked.mask_id]) == ""
    assert masked.piece(masked.mask_id) == MASK_TOKEN
    assert TOKENIZER.mask_id is None
    assert TOKENIZER.decode(TOKENIZER.encode(MASK_TOKEN)) == MASK_TOKEN, "without a mask token it is text"


@pytest.mark.parametrize("text", AWKWARD)
def test_mask_token_does_not_change_the_tokens_of_other_texts(text: str) -> None:
    """Compared with a vocabulary without mask token, every id is one higher, because there is one token more."""
    plain = Tokenizer.train(SENTENCES, vocab_size=339)
    assert MASKED.encode(text) == [index + 1 for index in plain.encode(text)]
    assert MASKED.decode(MASKED.encode(text)) == MASKED.normalize(text)


@pytest.mark.parametrize("word", ["weather", "The", "12"])
@pytest.mark.parametrize("text", ["The weather is nice, 12 of them.", "is it the weather?", "weather"])
def test_mask_token_in_a_text_replaces_a_word(text: str, word: str) -> None:
    """The tokens before and after the mask are the same as in the text without a mask."""
    expected: list[int | None] = []
    for piece in re.split(rf"( ?\b{word}\b)", " " + text):
        expected += [MASKED.mask_id] if piece.strip() == word else pieces_of(piece)
    assert MASKED.encode(re.sub(rf"\b{word}\b", MASK_TOKEN, text)) == expected


def pieces_of(piece: str) -> list[int]:
    """Return the tokens of a text inside another text: they are computed after a letter, whose token is removed."""
    if piece.startswith(" ") or not piece:
        return MASKED.encode(piece)
    return MASKED.encode("q" + piece)[len(MASKED.encode("q")) :]


def test_encoder_format_places_special_tokens() -> None:
    masked = Tokenizer.train(SENTENCES, vocab_size=340, extra_special=[MASK_TOKEN])
    text = encoder_format(masked)
    assert text.mask_id == masked.mask_id
    assert set(text.special_ids) == set(range(len(SPECIAL_TOKENS) + 1))
    assert text.pair_template is not None
    assert text.pair_start == text.pair_template.index("$pair")
    assert encoder_format(TOKENIZER).mask_id is None


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
