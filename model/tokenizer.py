"""Text to token ids and back: byte-level BPE, exact in both directions and while streaming. Torch-free.

Normalisation: NFC, every run of white space becomes one space, none at the ends. It is stored in tokenizer.json, so
training and serving cannot differ. After it nothing is lost: each token stands for a fixed string of bytes, and a text
is the concatenation of its tokens' bytes (after the leading space that marks a word's beginning).
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Tokenizer

from antiphon.model.text_format import TextFormat

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"  # of encoders that fill masks; others do without


class TokenizerError(Exception):
    """A tokenizer file cannot be used; the message names it."""


def _byte_alphabet() -> dict[str, int]:
    """Byte of each printable stand-in of byte-level BPE (Radford et al. 2019); printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """Vocabulary and rules of one model; safe to share between threads."""

    def __init__(self, backend: _Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True  # "</s>" typed by a user is text, not the end token
        self.vocab_size: int = backend.get_vocab_size()
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = (self._special(token) for token in SPECIAL_TOKENS)
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self.mask_id: int | None = backend.token_to_id(MASK_TOKEN) if MASK_TOKEN in added else None
        alphabet = _byte_alphabet()
        specials = {*SPECIAL_TOKENS, *added}
        self._token_bytes = [b""] * self.vocab_size
        for token, index in backend.get_vocab().items():
            if token not in specials:
                self._token_bytes[index] = bytes(alphabet[char] for char in token)
        self._longest_token = max(1, *map(len, self._token_bytes))

    def _special(self, token: str) -> int:
        index: int | None = self._backend.token_to_id(token)
        if index is None:
            raise TokenizerError(f"the vocabulary has no {token}")
        return index

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json. Raises TokenizerError naming the file."""
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None
        except KeyError as error:
            raise TokenizerError(f"{path}: not a byte-level vocabulary, it holds the character {error}") from None
        except Exception as error:  # the Rust library raises bare Exception for any defect of the file
            raise TokenizerError(f"{path} cannot be read: {error}") from None

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, extra_special: Sequence[str] = ()) -> Tokenizer:
        """Learn BPE merges (Sennrich et al. 2016) over bytes from texts until the vocabulary has vocab_size entries.

        extra_special: tokens that stand for no text, after SPECIAL_TOKENS.
        """
        backend = _Tokenizer(models.BPE())
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL_TOKENS, *extra_special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        self._backend.save(str(path))

    def normalize(self, text: str) -> str:
        """The text that `decode(encode(text))` gives back."""
        return self._backend.normalizer.normalize_str(text)  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no begin or end token; empty for a text of white space."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel; other threads run meanwhile."""
        return [item.ids for item in self._backend.encode_batch(texts, add_special_tokens=False)]

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `encode` cannot stay below, found without tokenising."""
        normal = " ".join(unicodedata.normalize("NFC", text).split())
        return -(-len(normal.encode()) // self._longest_token)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes that tokens stand for, leading space included; special tokens stand for none."""
        return b"".join(self._token_bytes[index] for index in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", errors="replace").removeprefix(" ")

    def piece(self, index: int) -> str:
        """One token to look at: its text, leading space included; a special token's name; bytes that are no text."""
        token_bytes = self._token_bytes[index]
        if not token_bytes:
            return str(self._backend.id_to_token(index))
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in token_bytes)

    def stream(self) -> IncrementalDecoder:
        """A decoder for one output that arrives in pieces."""
        return IncrementalDecoder(self)


def open_tokenizer(folder: Path, text: TextFormat) -> Tokenizer:
    """The tokenizer whose files lie in `folder`. Raises TokenizerError naming the file."""
    if text.kind != "byte_bpe" or text.source is None:
        raise TokenizerError(f"{folder}: tokenizers of kind {text.kind!r} are not known")
    return Tokenizer.load(folder / text.source)


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


class IncrementalDecoder:
    """Turns ids that arrive in pieces into text deltas that concatenate to `Tokenizer.decode` of all of them.

    A character whose bytes are split between tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self._emit(self._utf8.decode(self._tokenizer.bytes_of(ids)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and not self._started:
            self._started = True
            return text.removeprefix(" ")
        return text
