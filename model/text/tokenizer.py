"""Text to token ids and back: a segmenter for each side, and a table of what tokens stand for. Torch-free.

Our own models read byte-level BPE (byte_bpe.py). Imported models read and write as their originals do: their files are
opened by open_text.py, which `open_tokenizer` asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from antiphon.model.text import byte_bpe
from antiphon.model.text.byte_bpe import MASK_TOKEN as MASK_TOKEN
from antiphon.model.text.byte_bpe import SPECIAL_TOKENS as SPECIAL_TOKENS
from antiphon.model.text.format import TextFormat
from antiphon.model.text.format import TokenizerError as TokenizerError
from antiphon.model.text.open_text import Opened, open_text
from antiphon.model.text.segmenters import Encoding
from antiphon.model.text.template import LanguageIds, fill
from antiphon.model.text.token_table import IncrementalDecoder as IncrementalDecoder


class Tokenizer:
    """Vocabulary and rules of one model; safe to share between threads. Ids are those of its target side.

    pad_id, bos_id, eos_id, unk_id and mask_id are our own models' alone: of an imported one, ModelConfig and TextFormat
    name them.
    """

    def __init__(self, opened: Opened, backend: Any = None) -> None:
        """backend: of byte-level BPE, which knows its special tokens, can be saved and says how it normalises."""
        self._opened = opened
        self._table = opened.table
        self._backend = backend
        self.vocab_size = len(opened.table.pieces)
        if backend is not None:
            self.pad_id, self.bos_id, self.eos_id, self.unk_id = map(backend.token_to_id, SPECIAL_TOKENS)
            self.mask_id: int | None = byte_bpe.mask_id(backend)

    @classmethod
    def of_byte_bpe(cls, backend: Any) -> Tokenizer:
        """Of a `tokenizers` backend. Raises TokenizerError where it is no byte-level BPE with our special tokens."""
        return cls(byte_bpe.opened(backend), backend)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read the tokenizer.json of byte-level BPE. Raises TokenizerError naming the file."""
        backend = byte_bpe.read(path)
        try:
            return cls.of_byte_bpe(backend)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, extra_special: Sequence[str] = ()) -> Tokenizer:
        """Learn byte-level BPE from texts until the vocabulary has vocab_size entries.

        extra_special: tokens that stand for no text, after SPECIAL_TOKENS.
        """
        return cls.of_byte_bpe(byte_bpe.train(texts, vocab_size, extra_special))

    def save(self, path: Path) -> None:
        """Write the tokenizer.json of byte-level BPE."""
        self._backend.save(str(path))

    def normalize(self, text: str) -> str:
        """The text that `decode(encode(text))` gives back, of byte-level BPE."""
        return self._backend.normalizer.normalize_str(text)  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Token ids of a source, nothing put around it; empty for a text of white space."""
        return self._opened.source.ids(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel; other threads run meanwhile."""
        return self._opened.source.ids_of_many(texts)

    def encode_source(self, text: str) -> Encoding:
        """`encode`, and where each token stands in the text."""
        return self._opened.source.encode(text)

    def encode_target(self, text: str) -> list[int]:
        """Token ids of a target, nothing put around it."""
        return self._opened.target.ids(text)

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_target` of many texts, in parallel; other threads run meanwhile."""
        return self._opened.target.ids_of_many(texts)

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `encode` cannot stay below, found without tokenising all of a long text."""
        return self._opened.source.min_tokens(text)

    def min_target_tokens(self, text: str) -> int:
        """As `min_tokens`, of a target."""
        return self._opened.target.min_tokens(text)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes that tokens stand for, leading space included; special tokens stand for none."""
        return self._table.bytes_of(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a target's token ids; bytes that are not UTF-8 become U+FFFD, or nothing where the original says so.

        As the original's decode without special tokens and clean-up, but for what no text encodes to: a run of <0xNN>
        tokens that is no UTF-8 becomes a U+FFFD for each broken character, not for each token of the run.
        """
        return self._table.decode(ids)

    def decode_source(self, ids: Sequence[int]) -> str:
        """Text of a source's token ids, which mean other tokens where the two sides have vocabularies of their own."""
        return self._opened.source_table.decode(ids)

    def piece(self, index: int) -> str:
        """One token to look at: its text, leading space included; a special token's name; bytes that are no text."""
        return self._table.piece(index)

    def source_piece(self, index: int) -> str:
        """As `piece`, of a source's token."""
        return self._opened.source_table.piece(index)

    def stream(self) -> IncrementalDecoder:
        """A decoder for one output that arrives in pieces."""
        return IncrementalDecoder(self._table)


def open_tokenizer(folder: Path, text: TextFormat) -> Tokenizer:
    """The tokenizer whose files lie in `folder`. Raises TokenizerError naming the file."""
    if text.kind == "byte_bpe":
        return Tokenizer.load(folder / (text.source or ""))
    return Tokenizer(open_text(folder, text))


def encode_sources(
    tokenizer: Tokenizer, text: TextFormat, texts: Sequence[str], languages: LanguageIds | None = None
) -> list[list[int]]:
    """Sources as the model reads them, in its default languages unless others are given; empty for empty texts."""
    if languages is None:
        codes = (text.default_source_language, text.default_target_language)
        languages = LanguageIds(*(None if code is None else text.languages[code] for code in codes))
    encoded = tokenizer.encode_batch(texts)
    return [list(fill(text, ids, None, languages)[0]) if ids else [] for ids in encoded]


def byte_bpe_format(tokenizer: Tokenizer) -> TextFormat:
    """How texts become tokens of our own models: tokenizer.json, the end token behind a source."""
    special_ids = (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id)
    return TextFormat(special_ids=special_ids, template=("$text", tokenizer.eos_id))


def encoder_format(tokenizer: Tokenizer) -> TextFormat:
    """How an encoder of our own reads: <s> text </s>, or <s> text </s> pair </s> with the pair of token type 1."""
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    special_ids = byte_bpe_format(tokenizer).special_ids
    return TextFormat(
        special_ids=special_ids if tokenizer.mask_id is None else (*special_ids, tokenizer.mask_id),
        template=(begin, "$text", end),
        pair_template=(begin, "$text", end, "$pair", end),
        pair_start=3,
        mask_id=tokenizer.mask_id,
    )
