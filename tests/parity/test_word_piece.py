"""WordPiece that is learned here, compared with transformers' BertTokenizer that reads the same vocab.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.text.format import fill
from antiphon.text.subwords import MASK_ID, WORD_PIECE_FORMAT, WORD_PIECE_TOKENS
from antiphon.text.tokenizer import Tokenizer, open_tokenizer

TEXTS = [
    "The cat sat on the mat.",
    "Der Hund läuft schnell über die Straße",
    "I don't know: it's 12 o'clock!",
    "Größe und Übung, naïve café",
    "日本語 テキスト",
    "a mouse, a house, a horse and a nurse run outside; the cats and the mice sit inside the houses",
] * 20
AWKWARD = [
    "",
    " \t\n",
    "Cats' MATS",
    "unseen qxz words",
    "e\u0301\u0323 na\u00efve",
    "漢字 ☃ 日本",
    "x" * 300,
    "a\x00b\u200bc",
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tokenizer.json of a vocabulary of 160 entries, and its vocab.txt."""
    folder = tmp_path_factory.mktemp("word-piece")
    Tokenizer.train_word_piece(TEXTS, 160).save(folder / "tokenizer.json")
    ids: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)))
    return folder


@pytest.fixture(scope="module")
def ours(learned: Path) -> Tokenizer:
    return open_tokenizer(learned, WORD_PIECE_FORMAT)


@pytest.fixture(scope="module")
def theirs(learned: Path) -> Any:
    return transformers.BertTokenizer(vocab=str(learned / "vocab.txt"), do_lower_case=True)


@pytest.mark.parametrize("text", [*TEXTS[:6], *AWKWARD])
def test_ids_and_offsets_equal_those_of_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    found = ours.encode_source(text)
    assert found.ids == expected["input_ids"]
    assert found.offsets == expected["offset_mapping"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text(st.sampled_from("the catsonmDurlüÜß日本.,'-# ☃1"), max_size=40), st.text(min_size=1, max_size=20))
def test_ids_and_token_types_of_random_pairs_equal_those_of_transformers(
    ours: Tokenizer, theirs: Any, first: str, second: str
) -> None:
    expected = theirs(first, second)
    ids, types = fill(WORD_PIECE_FORMAT, ours.encode(first), ours.encode(second))
    assert list(ids) == expected["input_ids"]
    assert list(types) == expected["token_type_ids"]


def test_format_equals_that_of_an_imported_bert(theirs: Any, learned: Path, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    assert tokenizers_format(tmp_path) == WORD_PIECE_FORMAT
    assert tokenizers_format(learned).template == WORD_PIECE_FORMAT.template


def test_vocabulary_has_the_special_tokens_first_and_the_size_asked_for(ours: Tokenizer) -> None:
    assert tuple(map(ours.piece, range(5))) == WORD_PIECE_TOKENS
    assert ours.vocab_size == 160
    assert ours.decode(ours.encode("The CAT")) == "the cat"


def test_mask_token_in_a_text_is_one_token(ours: Tokenizer, theirs: Any) -> None:
    assert ours.encode("the [MASK] sat") == theirs("the [MASK] sat", add_special_tokens=False)["input_ids"]
    assert MASK_ID in ours.encode("the [MASK] sat")


def test_same_texts_give_the_same_vocabulary(learned: Path, tmp_path: Path) -> None:
    Tokenizer.train_word_piece(TEXTS, 160).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (learned / "tokenizer.json").read_bytes()
