"""Tokenizer: text to token ids and back, with a segmenter and a token table for source and target. Imports no torch.

Models trained by this project have the vocabularies of subwords.py. Imported models give the same ids and texts as
their original tokenizers; segmenters.py opens their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from antiphon.errors import TokenizerError as TokenizerError
from antiphon.text import subwords
from antiphon.text.format import LanguageIds, TextFormat, fill
from antiphon.text.segmenters import Encoding, Vocabularies, open_backend, open_text
from antiphon.text.subwords import MASK_TOKEN as MASK_TOKEN
from antiphon.text.subwords import SPECIAL_TOKENS as SPECIAL_TOKENS
from antiphon.text.token_table import IncrementalDecoder as IncrementalDecoder


class Tokenizer:
    """Tokenizer of one model; safe to share between threads. Ids are target ids unless a method says otherwise.

    The attributes pad_id, bos_id, eos_id, unk_id and mask_id exist only for byte-level BPE. For an imported model
    ModelConfig and TextFormat have these ids.
    """

    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    mask_id: int | None

    def __init__(self, vocabularies: Vocabularies, backend: Any = None) -> None:
        """Create a tokenizer; backend is the `tokenizers.Tokenizer` of a vocabulary trained here, else None."""
        self._vocabularies = vocabularies
        self._table = vocabularies.table
        self._backend = backend
        self.vocab_size = len(vocabularies.table.pieces)

    @classmethod
    def of_byte_bpe(cls, backend: Any) -> Tokenizer:
        """Create one from a backend. Raises TokenizerError if it is not byte-level BPE with our special tokens."""
        tokenizer = cls(subwords.byte_vocabularies(backend), backend)
        ids = map(backend.token_to_id, SPECIAL_TOKENS)
        tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id = ids
        tokenizer.mask_id = subwords.mask_id(backend)
        return tokenizer

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json of byte-level BPE. Raises TokenizerError naming the file."""
        backend = subwords.read_byte_bpe(path)
        try:
            return cls.of_byte_bpe(backend)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, extra_special: Sequence[str] = ()) -> Tokenizer:
        """Learn byte-level BPE from texts until the vocabulary has vocab_size entries.

        extra_special: special tokens after SPECIAL_TOKENS.
        """
        return cls.of_byte_bpe(subwords.train_byte_bpe(texts, vocab_size, extra_special))

    @classmethod
    def train_exact_bpe(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn exact BPE from texts until the vocabulary has vocab_size entries, see subwords.py."""
        backend = subwords.train_exact_bpe(texts, vocab_size)
        return cls(subwords.exact_vocabularies(backend), backend)

    @classmethod
    def train_word_piece(cls, texts: Sequence[str], vocab_size: int) -> Tokenizer:
        """Learn BERT's WordPiece from texts until the vocabulary has vocab_size entries, see subwords.py."""
        backend = subwords.train_word_piece(texts, vocab_size)
        return cls(
            open_backend(json.loads(backend.to_str()), subwords.WORD_PIECE_FORMAT, Path("tokenizer.json")), backend
        )

    def save(self, path: Path) -> None:
        """Write a tokenizer.json; only for a vocabulary trained here."""
        self._backend.save(str(path))

    def merges(self) -> list[tuple[int, int, int]]:
        """Return the ids of each merge: merged token, left part, right part; only for byte-level BPE."""
        return subwords.merges_of(self._backend)

    def normalize(self, text: str) -> str:
        """Return the normalised text, which is equal to `decode(encode(text))`; only for byte-level BPE."""
        return self._backend.normalizer.normalize_str(text)  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Return the source token ids of a text, without the template's tokens; empty for white space."""
        return self._vocabularies.source.ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of several texts, computed in parallel. Releases the interpreter lock if the library does."""
        return self._vocabularies.source.ids_of_many(texts)

    def encode_source(self, text: str) -> Encoding:
        """Return `encode` together with the position of each token in the text."""
        return self._vocabularies.source.encode(text)

    def encode_target(self, text: str) -> list[int]:
        """Return the target token ids of a text, without special tokens."""
        return self._vocabularies.target.ids(text)

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode_target` of several texts, as `encode_batch` does."""
        return self._vocabularies.target.ids_of_many(texts)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of source tokens, without tokenising all of a long text."""
        return self._vocabularies.source.min_tokens(text)

    def min_target_tokens(self, text: str) -> int:
        """Return a lower bound of the number of target tokens, as `min_tokens` does."""
        return self._vocabularies.target.min_tokens(text)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 bytes of target tokens with the leading space; special tokens have no bytes."""
        return self._table.bytes_of(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of target token ids. Invalid UTF-8 becomes U+FFFD, or is ignored as in the original.

        The text is equal to the original tokenizer's decode without special tokens and without clean-up, with one
        exception that no encoded text reaches: a sequence of <0xNN> tokens that is invalid UTF-8 becomes one U+FFFD
        for each broken character, not for each token.
        """
        return self._table.decode(ids)

    def decode_source(self, ids: Sequence[int]) -> str:
        """Return the text of source token ids; they differ from target ids if the model has two vocabularies."""
        return self._vocabularies.source_table.decode(ids)

    def piece(self, index: int) -> str:
        """Return one target token for display: its text with leading space, a special token's name, or <0xNN>."""
        return self._table.piece(index)

    def source_piece(self, index: int) -> str:
        """Return one source token for display, as `piece` does."""
        return self._vocabularies.source_table.piece(index)

    def stream(self) -> IncrementalDecoder:
        """Return a decoder for one streamed output."""
        return IncrementalDecoder(self._table)


def open_tokenizer(folder: Path, text: TextFormat) -> Tokenizer:
    """Open the tokenizer whose files are in `folder`. Raises TokenizerError naming the file."""
    if text.kind == "byte_bpe":
        return Tokenizer.load(folder / (text.source or ""))
    return Tokenizer(open_text(folder, text))


def encode_sources(
    tokenizer: Tokenizer, text: TextFormat, texts: Sequence[str], languages: LanguageIds | None = None
) -> list[list[int]]:
    """Return complete source tokens of texts; empty for empty texts. languages=None: the model's default languages."""
    if languages is None:
        codes = (text.default_source_language, text.default_target_language)
        languages = LanguageIds(*(None if code is None else text.languages[code] for code in codes))
    encoded = tokenizer.encode_batch(texts)
    return [list(fill(text, ids, None, languages)[0]) if ids else [] for ids in encoded]


def byte_bpe_format(tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of models trained by this project: tokenizer.json, and the end token after a source."""
    special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id)
    return TextFormat(special_ids=special_ids, template=("$text", tokenizer.eos_id))


def encoder_format(tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of encoders trained by this project.

    Templates: <s> text </s>, and <s> text </s> pair </s>, where the second text and its </s> have token type 1.
    """
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    special_ids = byte_bpe_format(tokenizer).special_ids
    return TextFormat(
        special_ids=special_ids if tokenizer.mask_id is None else (*special_ids, tokenizer.mask_id),
        template=(begin, "$text", end),
        pair_template=(begin, "$text", end, "$pair", end),
        pair_start=3,
        mask_id=tokenizer.mask_id,
    )


def exact_bpe_format() -> TextFormat:
    """Return the text format of language models trained by this project: a prompt has the tokens of its text only."""
    return TextFormat(kind="tokenizers", special_ids=(subwords.EXACT_END_ID,), template=("$text",))
