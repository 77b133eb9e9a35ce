import re
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from antiphon.errors import TokenizerError
from antiphon.text.tokenizer import MASK_TOKEN, SPECIAL_TOKENS, Tokenizer, encoder_format

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
