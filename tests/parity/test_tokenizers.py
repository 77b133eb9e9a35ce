"""Our tokenizers of public families compared with transformers', from the files that transformers saves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from antiphon.checkpoints.text_formats import Languages, sentencepiece_format, tokenizers_format
from antiphon.errors import TokenizerError
from antiphon.rpc.v1.responses import Detokenizer
from antiphon.text.format import LanguageIds, TextFormat, fill, language_id
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from tests.parity.tokenizer_checkpoints import FAIRSEQ_TOKENS, KINDS, NLLB_LANGUAGES, pieces

AWKWARD = [
    "",
    "   ",
    "\n",
    "the cat sat on the mat.",
    " leading",
    "trailing  ",
    "two  spaces   three",
    "\ttabs and\r\nlines",
    "👩‍👩‍👧 naïve cafe\u0301",
    "e\u0301\u0323 q\u0303",
    "שלום עולם",
    "مرحبا abc \u202eשלום\u202c",
    "日本語 テキスト 漢字",
    "a\x00b\x07c\u200bd\ufeffe",
    "ﬁ ① Ⅳ ㎏",
    "\u2028\u00a0x\u3000y",
    "𝔘𝔫𝔦 \U0010ffff",
    "don't 'm n't , . ! ?",
    "▁the▁ <0x41> ##ing Ġx",
    "</s> <s> <pad> [CLS] [SEP] <unk> <|endoftext|>",
    "en_XX fra_Latn __fr__ ace_Arab",
    ">>fra<< the cat",
    ">>xyz<< the cat",
    "the >>fra<< cat",
    "x" * 300,
    "the cat " * 1250,
    "日本" * 5000,
]
SPECIALS_AS_TEXT: dict[str, Any] = dict(split_special_tokens=True)
SLOW = ["Marian", "Marian, vocabularies apart", "M2M-100", "ByT5"]
FAST = [name for name in KINDS if name not in SLOW]
RANDOM = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True, slots=True)
class Pair:
    """The same tokenizer in transformers and in our code."""

    theirs: Any
    ours: Tokenizer
    text: TextFormat

    @property
    def languages(self) -> LanguageIds:
        """Return the default source language, as in transformers."""
        return LanguageIds(source=language_id(self.text, "", self.text.default_source_language))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(request.param, tmp_path_factory.mktemp("tokenizer"))


def pair_of(name: str, folder: Path) -> Pair:
    trained, saved = folder / "trained", folder / "saved"
    trained.mkdir()
    theirs = KINDS[name].build(trained)
    theirs.save_pretrained(saved)
    text = KINDS[name].describe(saved)
    # As in a bundle's manifest.
    return Pair(theirs, open_tokenizer(saved, TextFormat.model_validate_json(text.model_dump_json())), text)


def their_text(theirs: Any, ids: list[int]) -> str:
    text: str = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def check_text(pair: Pair, text: str) -> None:
    """Compare ids, offsets and decoded text; special tokens inside the text are ordinary text."""
    expected = pair.theirs(text, add_special_tokens=False, **SPECIALS_AS_TEXT).input_ids
    found = pair.ours.encode_source(text)
    assert found.ids == expected
    assert pair.ours.encode(text) == pair.ours.encode_batch([text])[0] == expected
    assert pair.ours.decode_source(expected) == their_text(pair.theirs, expected) or has_source_of_its_own(pair)
    if pair.theirs.is_fast:
        theirs = pair.theirs(text, add_special_tokens=False, return_offsets_mapping=True, **SPECIALS_AS_TEXT)
        assert [tuple(span) for span in found.offsets] == [tuple(span) for span in theirs.offset_mapping]


def has_source_of_its_own(pair: Pair) -> bool:
    """Return whether the source has a separate vocabulary; transformers decodes only with the target's."""
    return pair.text.target_vocabulary not in (None, pair.text.source_vocabulary)


@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_awkward_texts_give_the_same_tokens(pair: Pair, text: str) -> None:
    check_text(pair, text)


@given(text=st.text(max_size=40))
@RANDOM
def test_random_texts_give_the_same_tokens(pair: Pair, text: str) -> None:
    check_text(pair, text)


@given(words=st.lists(st.sampled_from(["the", "cat", " ", "  ", "ö", "ß", "日", "ש", "\u0301", ".", "'s", "🎼"])))
@RANDOM
def test_known_words_give_the_same_tokens(pair: Pair, words: list[str]) -> None:
    check_text(pair, "".join(words))


@given(data=st.data())
@RANDOM
def test_random_ids_decode_to_the_same_text_for_any_split(pair: Pair, data: st.DataObject) -> None:
    """The only exception are invalid UTF-8 bytes: the number of U+FFFD for a sequence of them."""
    ids = data.draw(st.lists(st.integers(0, len(pair.theirs) - 1), max_size=12))
    text = pair.ours.decode(ids)
    assert_streams(pair.ours, ids, text, data.draw(st.lists(st.integers(0, 3), max_size=12)))
    expected = their_text(pair.theirs, ids)
    assume("\ufffd" not in expected)
    assert text == expected


@pytest.mark.parametrize("text", ["the cat sat on the mat.", "Größe und Übung", "naïve café", "日本語 テキスト"])
def test_prefix_and_continuation_join_to_the_whole_text_with_one_space(pair: Pair, text: str) -> None:
    """The text is split between tokens, also within words; if a space follows, the prefix can end with it."""
    ids = pair.ours.encode_target(text)
    whole, num_spaced = pair.ours.decode(ids), 0
    for cut in range(1, len(ids)):
        prefix = pair.ours.decode(ids[:cut])
        if "\ufffd" in prefix:  # split within a character
            continue
        behind = whole.removeprefix(prefix)
        assert continuation(pair.ours, prefix, ids[:cut], ids[cut:]) == behind
        spaced_ids = pair.ours.encode_target(prefix + " ")
        if behind.startswith(" ") and spaced_ids == ids[:cut]:
            num_spaced += 1
            assert continuation(pair.ours, prefix + " ", spaced_ids, ids[cut:]) == behind[1:]
    assert num_spaced or pair.ours.encode_target("a ") != pair.ours.encode_target("a")


def continuation(tokenizer: Tokenizer, prefix_text: str, prefix_ids: list[int], ids: list[int]) -> str:
    """Return the text of an output after a prefix, after a check that decoding token by token gives the same."""
    detokenizer = Detokenizer(tokenizer, prefix_ids=prefix_ids, prefix_text=prefix_text, stop_strings=())
    at_once, streamed = detokenizer.text(), detokenizer.text()
    text = at_once.push(ids) + at_once.finish()
    assert "".join([*(streamed.push([index]) for index in ids), streamed.finish()]) == text
    return text


def assert_streams(tokenizer: Tokenizer, ids: list[int], text: str, sizes: list[int]) -> None:
    stream, deltas, rest = tokenizer.stream(), [], list(ids)
    for size in sizes:
        deltas.append(stream.push(rest[:size]))
        rest = rest[size:]
    assert "".join([*deltas, stream.push(rest), stream.finish()]) == text


@pytest.mark.parametrize("text", [text for text in AWKWARD if len(text) < 100], ids=str)
def test_texts_stream_token_by_token(pair: Pair, text: str) -> None:
    ids = pair.ours.encode_target(text)
    assert_streams(pair.ours, ids, pair.ours.decode(ids), [1] * len(ids))
    stream = pair.ours.stream()
    assert "\ufffd" not in "".join(stream.push([index]) for index in ids)


def test_template_adds_the_same_tokens_to_texts(pair: Pair) -> None:
    for text in ("the cat", "a mat. </s>", ""):
        expected = pair.theirs(text, **SPECIALS_AS_TEXT).input_ids
        filled, types = fill(pair.text, pair.ours.encode(text), None, pair.languages)
        assert list(filled) == expected
        assert set(types) <= {0}


def test_template_adds_the_same_tokens_and_types_to_pairs(pair: Pair) -> None:
    if pair.text.pair_template is None:
        assert not pair.theirs.is_fast
        return
    first, second = "the cat", "a mat."
    expected = pair.theirs(first, second, return_token_type_ids=True)
    filled, types = fill(pair.text, pair.ours.encode(first), pair.ours.encode(second), pair.languages)
    assert list(filled) == expected.input_ids
    assert list(types) == expected.token_type_ids


def test_special_ids_are_those_that_decode_to_nothing(pair: Pair) -> None:
    special = set(pair.theirs.all_special_ids)
    assert set(pair.text.special_ids) == special
    assert pair.text.mask_id == pair.theirs.mask_token_id
    assert pair.ours.vocab_size == len(pair.theirs)
    assert pair.ours.decode([*special, pair.ours.vocab_size + 5]) == ""


def test_mask_token_in_a_text_is_encoded_as_the_mask_token(pair: Pair) -> None:
    """The white space around the mask token is compared too, because some families remove it."""
    mask = pair.theirs.mask_token
    if mask is None or pair.text.mask_id is None:
        assert pair.text.mask_id is None
        return
    for text in (f"the {mask} cat", f"{mask}{mask}", f"a{mask} b", f"{mask}"):
        assert pair.ours.encode(text) == pair.theirs(text, add_special_tokens=False).input_ids
        assert pair.text.mask_id in pair.ours.encode(text)


@pytest.mark.parametrize("name", ["T5", "ByT5"])
def test_sentinels_in_a_text_are_encoded_as_tokens(name: str, tmp_path: Path) -> None:
    pair = pair_of(name, tmp_path)
    for text in ("the <extra_id_0> cat <extra_id_12>.", "<extra_id_1>", "a<extra_id_99>b"):
        assert pair.ours.encode(text) == pair.theirs(text, add_special_tokens=False).input_ids


def test_marian_encodes_targets_with_the_target_vocabulary(tmp_path: Path) -> None:
    pair = pair_of("Marian, vocabularies apart", tmp_path)
    for text in ("the cat", "Größe und Übung", "日本語"):
        expected = pair.theirs(text_target=text, add_special_tokens=False).input_ids
        assert pair.ours.encode_target(text) == expected
        assert pair.ours.decode(expected) == their_text(pair.theirs, expected)
        assert pair.ours.encode(text) == pair.theirs(text, add_special_tokens=False).input_ids
    ids = pair.ours.encode("the cat")
    assert pair.ours.decode_source(ids) == "the cat" != pair.ours.decode(ids)


def test_languages_are_those_of_the_tokens(tmp_path: Path) -> None:
    pair = pair_of("NLLB", tmp_path)
    assert pair.text.languages == {code: pair.theirs.convert_tokens_to_ids(code) for code in NLLB_LANGUAGES}
    pair.theirs.src_lang = "fra_Latn"
    filled, _ = fill(pair.text, pair.ours.encode("chat"), None, LanguageIds(source=pair.text.languages["fra_Latn"]))
    assert list(filled) == pair.theirs("chat").input_ids


def test_m2m100_languages_follow_the_vocabulary(tmp_path: Path) -> None:
    pair = pair_of("M2M-100", tmp_path)
    assert pair.text.languages == dict(sorted(pair.theirs.lang_code_to_id.items()))


@pytest.mark.parametrize("name", SLOW)
def test_offsets_are_the_positions_of_tokens(name: str, tmp_path: Path) -> None:
    """transformers has no offsets here, so the test encodes each token's part of the text and compares the token."""
    pair = pair_of(name, tmp_path)
    for text in ("the cat  sat", "Größe 日本語", "naïve café 👩‍👩‍👧 x", " ﬁ ㎏"):
        found = pair.ours.encode_source(text)
        ends = [end for _, end in found.offsets]
        assert ends == sorted(ends)
        assert all(0 <= start <= end <= len(text) for start, end in found.offsets)
        if "ﬁ" in text or name == "ByT5":
            continue
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            part = " ".join(text[start:end].split())
            assert index in pair.text.special_ids or pair.ours.source_piece(index).strip() == part


SHIFTED: dict[str, dict[str, Any]] = {
    "T5": dict(template=("$text", "</s>")),
    "fairseq": dict(
        template=("$source_language", "$text", "</s>"),
        id_offset=1,
        added_tokens=FAIRSEQ_TOKENS,
        special_tokens=["en_XX", "de_DE", "<mask>"],
        languages=Languages(place="first", source="en_XX"),
    ),
    "PEGASUS": dict(template=("$text", "</s>"), id_offset=103, added_tokens={"<pad>": 0, "</s>": 1, "<mask_2>": 3}),
}


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("text", AWKWARD, ids=range(len(AWKWARD)))
def test_sentencepiece_models_without_other_files_give_the_tokens_of_their_library(
    name: str, text: str, tmp_path: Path
) -> None:
    described = SHIFTED[name]
    ids: dict[str, Any] = dict(bos_id=-1, pad_id=0, eos_id=1, unk_id=2) if name != "fairseq" else {}
    pieces(tmp_path / "spiece.model", **ids)
    tokenizer = open_tokenizer(tmp_path, sentencepiece_format(tmp_path, "spiece.model", **described))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    theirs = processor.encode(text)
    offset = described.get("id_offset", 0)
    named = described.get("added_tokens", {})
    assert tokenizer.encode(text) == [named.get(processor.id_to_piece(index), index + offset) for index in theirs]
    known = [index for index in theirs if not processor.is_unknown(index)]
    expected = [named.get(processor.id_to_piece(index), index + offset) for index in known]
    assert tokenizer.decode(expected) == processor.decode(known)


def test_pegasus_without_other_files_has_the_ids_of_the_original(tmp_path: Path) -> None:
    pieces(tmp_path / "spiece.model", bos_id=-1, pad_id=0, eos_id=1, unk_id=2)
    theirs = transformers.PegasusTokenizer.from_pretrained(tmp_path)
    text = sentencepiece_format(tmp_path, "spiece.model", **SHIFTED["PEGASUS"])
    ours = open_tokenizer(tmp_path, text)
    shift = (
        103 if theirs.convert_tokens_to_ids("▁") < 103 else 0
    )  # transformers 5 does not change the ids of a SentencePiece model without other files
    for words in ("the cat sat on the mat.", "hello world", "naïve café"):
        assert ours.encode(words) == [index + shift for index in theirs(words, add_special_tokens=False).input_ids]
    assert text.template == ("$text", 1)


def test_decoder_that_looks_beyond_a_token_is_refused(tmp_path: Path) -> None:
    pair = KINDS["T5"].build(tmp_path)
    backend = pair.backend_tokenizer
    backend.decoder = decoders.BPEDecoder()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: its decoder 'BPEDecoder'"):
        open_tokenizer(tmp_path, tokenizers_format(tmp_path))


DEFECTS: list[dict[str, Any]] = [
    {"added_tokens": [{}]},
    {"added_tokens": 5},
    {"model": []},
    {"model": {"vocab": [[]]}},
    {"post_processor": {"type": "BertProcessing"}},
    {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {}}},
    {"decoder": {"type": "Strip"}},
    {"decoder": 7},
]


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_invalid_tokenizer_is_refused_by_name(defect: dict[str, Any], tmp_path: Path) -> None:
    KINDS["GPT-2"].build(tmp_path).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | defect))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        open_tokenizer(tmp_path, tokenizers_format(tmp_path))


@pytest.mark.parametrize("content", ["{}", '{"<unk>": "x"}', '{"<unk>": -1}'])
def test_invalid_vocabulary_is_refused_by_name(content: str, tmp_path: Path) -> None:
    KINDS["Marian"].build(tmp_path)
    text = KINDS["Marian"].describe(tmp_path)
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"vocab\.json: expected a JSON object"):
        open_tokenizer(tmp_path, text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_damaged_files_are_refused_by_name(name: str, content: bytes, tmp_path: Path) -> None:
    KINDS["GPT-2"].build(tmp_path).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name):
        tokenizers_format(tmp_path)
