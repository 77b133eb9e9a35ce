"""Small tokenizers of public families, saved by transformers, and our text formats of their files.

They are trained here on a few sentences. The vocabularies are tiny; files and rules are those of the real tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from antiphon.checkpoints.text_formats import (
    Languages,
    bytes_format,
    sentencepiece_format,
    tokenizers_format,
)
from antiphon.text.format import TextFormat

TEXTS = [
    "the cat sat on the mat.",
    "der Hund läuft schnell über die Straße",
    "hello world, how are you?",
    "I don't know: it's 12 o'clock!",
    "Größe und Übung",
    "日本語 テキスト",
    "שלום עולם",
    "naïve café",
] * 20
BYTE_LEVEL_SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
NLLB_LANGUAGES = ["ace_Arab", "eng_Latn", "fra_Latn", "zho_Hans"]
FAIRSEQ_TOKENS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}

Build = Callable[[Path], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Functions of a family: `build` trains a tokenizer in an empty folder, `describe` returns its text format."""

    build: Build
    describe: Callable[[Path], TextFormat] = tokenizers_format


def pieces(path: Path, kind: str = "unigram", **settings: Any) -> None:
    """Train a SentencePiece model and write it to `path`."""
    settings = {"vocab_size": 160, "hard_vocab_limit": False, **settings}
    with path.open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=stream, model_type=kind, minloglevel=2, **settings
        )


def of_pieces(name: str, file: str, kind: str = "unigram", load: Any = None, **settings: Any) -> Build:
    """Return a function that builds the transformers tokenizer of a SentencePiece model."""

    def build(folder: Path) -> Any:
        pieces(folder / file, kind, **settings)
        return getattr(transformers, name).from_pretrained(folder, **(load or {}))

    return build


def word_piece(name: str) -> Build:
    def build(folder: Path) -> Any:
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=specials, show_progress=False)
        backend.train_from_iterator(TEXTS, trainer)
        vocabulary = backend.get_vocab()
        (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
        return getattr(transformers, name).from_pretrained(folder)

    return build


def byte_level(name: str) -> Build:
    def build(folder: Path) -> Any:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=BYTE_LEVEL_SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(TEXTS, trainer)
        backend.model.save(str(folder))
        return getattr(transformers, name).from_pretrained(folder)

    return build


def marian(folder: Path) -> Any:
    """Build two SentencePiece models and one vocabulary with the pieces of both."""
    spelled: dict[str, None] = {}
    for side, size in (("source", 120), ("target", 160)):
        pieces(folder / f"{side}.spm", vocab_size=size)
        spelled |= dict.fromkeys(spellings(folder / f"{side}.spm"))
    names = ["</s>", "<unk>", *(name for name in spelled if name[0] != "<"), ">>fra<<", ">>deu<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    return transformers.MarianTokenizer.from_pretrained(folder)


def marian_apart(folder: Path) -> Any:
    """Build two SentencePiece models, each with a separate vocabulary."""
    for side, size in (("source", 120), ("target", 160)):
        pieces(folder / f"{side}.spm", vocab_size=size)
        held = sorted(name for name in spellings(folder / f"{side}.spm") if name[0] != "<")
        names = ["</s>", "<unk>", *(held if side == "source" else held[::-1]), "<pad>"]
        file = "vocab.json" if side == "source" else "target_vocab.json"
        (folder / file).write_text(json.dumps({name: index for index, name in enumerate(names)}))
    return transformers.MarianTokenizer.from_pretrained(folder, separate_vocabs=True)


def m2m100(folder: Path) -> Any:
    pieces(folder / "sentencepiece.bpe.model")
    names = ["<s>", "<pad>", "</s>", "<unk>", *spellings(folder / "sentencepiece.bpe.model")[3:]]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    return transformers.M2M100Tokenizer.from_pretrained(folder, src_lang="en", additional_special_tokens=languages)


def spellings(path: Path) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def _marian_format(folder: Path) -> TextFormat:
    apart = "target_vocab.json" if (folder / "target_vocab.json").exists() else None
    return sentencepiece_format(
        folder,
        "source.spm",
        target_model="target.spm",
        vocabulary="vocab.json",
        target_vocabulary=apart,
        template=("$target_language", "$text", "</s>"),
        languages=Languages(),
    )


def _m2m100_format(folder: Path) -> TextFormat:
    return sentencepiece_format(
        folder,
        "sentencepiece.bpe.model",
        vocabulary="vocab.json",
        template=("$source_language", "$text", "</s>"),
        languages=Languages(place="first"),
    )


def _multilingual(folder: Path) -> TextFormat:
    return tokenizers_format(folder, languages=Languages(place="first"))


_T5: dict[str, Any] = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
_ALBERT: dict[str, Any] = dict(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, user_defined_symbols="[CLS],[SEP],[MASK]")
_DEBERTA: dict[str, Any] = dict(
    pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]"
)
_LLAMA: dict[str, Any] = dict(
    byte_fallback=True, vocab_size=450, normalization_rule_name="identity", remove_extra_whitespaces=False
)

KINDS: dict[str, Kind] = {
    "BERT": Kind(word_piece("BertTokenizer")),
    "GPT-2": Kind(byte_level("GPT2Tokenizer")),
    "RoBERTa": Kind(byte_level("RobertaTokenizer")),
    "BART": Kind(byte_level("BartTokenizer")),
    "DeBERTa": Kind(byte_level("DebertaTokenizer")),
    "DeBERTa-v2": Kind(of_pieces("DebertaV2Tokenizer", "spm.model", **_DEBERTA)),
    "ALBERT": Kind(of_pieces("AlbertTokenizer", "spiece.model", **_ALBERT)),
    "XLM-RoBERTa": Kind(of_pieces("XLMRobertaTokenizer", "sentencepiece.bpe.model")),
    "T5": Kind(of_pieces("T5Tokenizer", "spiece.model", **_T5)),
    "PEGASUS": Kind(of_pieces("PegasusTokenizer", "spiece.model", **_T5)),
    "mBART": Kind(of_pieces("MBartTokenizer", "sentencepiece.bpe.model"), _multilingual),
    "mBART-50": Kind(of_pieces("MBart50Tokenizer", "sentencepiece.bpe.model"), _multilingual),
    "NLLB": Kind(
        of_pieces(
            "NllbTokenizer",
            "sentencepiece.bpe.model",
            "bpe",
            vocab_size=300,
            load=dict(additional_special_tokens=NLLB_LANGUAGES),
        ),
        _multilingual,
    ),
    "Llama": Kind(of_pieces("LlamaTokenizer", "tokenizer.model", "bpe", **_LLAMA)),
    "Marian": Kind(marian, _marian_format),
    "Marian, vocabularies apart": Kind(marian_apart, _marian_format),
    "M2M-100": Kind(m2m100, _m2m100_format),
    "ByT5": Kind(lambda folder: transformers.ByT5Tokenizer(), bytes_format),
}
