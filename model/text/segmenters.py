"""Texts into token ids: one class a kind of vocabulary, each as its original does it. Torch-free.

What a text may name: tokens that were added to a vocabulary and stand for text are matched whole, as in the original.
Special tokens typed by a user are text where the original allows it, so that nobody ends a source or switches its
language from within; but the mask token, T5's <extra_id_N> and Marian's >>fra<< are there to be typed, and matched.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SENTINEL = re.compile(r"<extra_id_\d+>|>>[^<>\s]+<<")
_WORD = re.compile(r"[^ \t\r\n]+")
# NFC makes UTF-8 shorter by less than this factor: at worst 7 bytes, U+1FBE U+0308 U+0301, become the 2 of U+0390.
_NFC_SHRINKING = 4
_PROBE_LEN = 20_000  # characters: some 10 ms of segmenting


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, and where each stands in it: code points [start, end) of the text as it was given."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Segmenter(ABC):
    """Splits texts into tokens; safe to share between threads."""

    @abstractmethod
    def encode(self, text: str) -> Encoding:
        """Ids and offsets of a text; nothing is put around it."""

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.encode(text).ids

    def ids_of_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, in parallel where the library can."""
        return [self.ids(text) for text in texts]

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `ids` cannot stay below, at little cost however long a text is.

        A vocabulary with unknown tokens gives no bound by length, for one token may stand for all of a text. So the
        whole words at the beginning of a long text are counted; a short one may as well be segmented, and gives 0.
        """
        end = text.rfind(" ", 0, _PROBE_LEN) if len(text) > _PROBE_LEN else 0
        return len(self.ids_of_many([text[:end]])[0]) if end > 0 else 0


def may_be_typed(token: str) -> bool:
    """Whether a special token is one that texts are to name."""
    return _SENTINEL.fullmatch(token) is not None


class Backend(Segmenter):
    """A `tokenizers` backend. Its encode_special_tokens must be on.

    longest_token: bytes of the longest token, where NFC and single spaces are all that a text loses; None otherwise.
    """

    def __init__(self, backend: Any, longest_token: int | None = None) -> None:
        self._backend = backend
        self._longest_token = longest_token

    def encode(self, text: str) -> Encoding:
        """Ids and offsets, as the library gives them; other threads run meanwhile."""
        found = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return Encoding(found.ids, found.offsets)

    def ids(self, text: str) -> list[int]:
        """Ids of a text; no other thread runs meanwhile."""
        return self._backend.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def ids_of_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts, in parallel; other threads run meanwhile."""
        return [item.ids for item in self._backend.encode_batch(texts, add_special_tokens=False)]

    def min_tokens(self, text: str) -> int:
        """As the segmenter's; by length where nothing is unknown."""
        if self._longest_token is None:
            return super().min_tokens(text)
        # Not by normalising: unordered combining marks take quadratic time, with the interpreter's lock held.
        shrinking = 1 if text.isascii() else _NFC_SHRINKING
        return -(-len(" ".join(text.split()).encode()) // (shrinking * self._longest_token))


class Pieces(Segmenter):
    """A SentencePiece model whose ids are mapped to those of the transformer that was trained with it.

    ids: of pieces, by the model's own ids, or by spelling: pieces that the model does not know are spelled as they are
        in the text, so that a vocabulary beside it may know them.
    unk_id: of what that vocabulary does not know either.
    typed: tokens matched whole, before the rest is segmented.
    has_codes: a text may begin with >>fra<<; a code that is not in the vocabulary is then the unknown token.
    """

    def __init__(
        self,
        processor: Any,
        ids: Sequence[int] | Mapping[str, int],
        unk_id: int,
        typed: Mapping[str, int],
        *,
        has_codes: bool = False,
    ) -> None:
        self._processor = processor
        self._ids = ids
        self._unk_id = unk_id
        self._typed = Typed(typed)
        self._has_codes = has_codes

    def encode(self, text: str) -> Encoding:
        """Ids and offsets; a word mark that the model puts first stands nowhere in the text."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, part, typed_id in self._parts(text):
            if typed_id is not None:
                ids.append(typed_id)
                offsets.append((start, start + len(part)))
                continue
            places = _code_points(part, start)
            pieces = self._processor.encode(part, return_type="proto").pieces
            is_spelt = isinstance(self._ids, Mapping)
            ids.extend(self._ids_of([piece.piece if is_spelt else piece.id for piece in pieces]))
            offsets.extend((places[piece.begin], places[piece.end]) for piece in pieces)
        return Encoding(ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Ids of a text; other threads run meanwhile, but for what the parts and ids take."""
        kind = str if isinstance(self._ids, Mapping) else int
        ids: list[int] = []
        for _, part, typed_id in self._parts(text):
            ids.extend(self._ids_of(self._processor.encode(part, out_type=kind)) if typed_id is None else [typed_id])
        return ids

    def _ids_of(self, pieces: Sequence[Any]) -> list[int]:
        """Ids of pieces, which are spellings or the model's own ids, as the mapping is by."""
        if isinstance(self._ids, Mapping):
            found, unk_id = self._ids, self._unk_id
            return [found.get(piece, unk_id) for piece in pieces]
        return [self._ids[piece] for piece in pieces]

    def _parts(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """Parts of a text and where they begin; with an id, if they are matched whole."""
        begin = 0
        if self._has_codes and text.startswith(">>") and (end := text.find("<<")) != -1:
            begin = end + 2
            yield 0, text[:begin], self._ids_of([text[:begin]])[0]
        yield from self._typed.split(text, begin)


class Bytes(Segmenter):
    """UTF-8 bytes, each id its byte and an offset (ByT5, Xue et al. 2022)."""

    def __init__(self, id_offset: int, typed: Mapping[str, int]) -> None:
        self._id_offset = id_offset
        self._typed = Typed(typed)
        self._longest_typed = max(map(len, typed), default=1)

    def encode(self, text: str) -> Encoding:
        """Ids and offsets; the bytes of a character all stand where it does."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, part, typed_id in self._typed.split(text):
            if typed_id is not None:
                ids.append(typed_id)
                offsets.append((start, start + len(part)))
                continue
            for place, char in enumerate(part, start):
                held = char.encode()
                ids.extend(byte + self._id_offset for byte in held)
                offsets.extend([(place, place + 1)] * len(held))
        return Encoding(ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = []
        for _, part, typed_id in self._typed.split(text):
            ids.extend([byte + self._id_offset for byte in part.encode()] if typed_id is None else [typed_id])
        return ids

    def min_tokens(self, text: str) -> int:
        """By length: every character takes a byte at least, but in a sentinel."""
        return -(-len(text) // self._longest_typed)


class Words(Segmenter):
    """Tokens between white space, looked up as they are."""

    def __init__(self, ids: Mapping[str, int], unk_id: int) -> None:
        self._ids = ids
        self._unk_id = unk_id

    def encode(self, text: str) -> Encoding:
        """Ids and offsets of the words."""
        found = list(_WORD.finditer(text))
        return Encoding([self._ids.get(word[0], self._unk_id) for word in found], [word.span() for word in found])

    def min_tokens(self, text: str) -> int:
        """The number of words."""
        return sum(1 for _ in _WORD.finditer(text))


class Typed:
    """Tokens that are matched whole wherever they stand in a text, the longest first."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if ids else None

    def split(self, text: str, begin: int = 0) -> Iterator[tuple[int, str, int | None]]:
        """Parts of text[begin:] that are not empty: where each begins, itself, its id if it is such a token."""
        for found in self._pattern.finditer(text, begin) if self._pattern else ():
            if begin < found.start():
                yield begin, text[begin : found.start()], None
            yield found.start(), found[0], self._ids[found[0]]
            begin = found.end()
        if begin < len(text):
            yield begin, text[begin:], None


def _code_points(text: str, start: int) -> Sequence[int]:
    """Index of the code point that each byte of a text belongs to, counted from `start`, and of the text's end."""
    if text.isascii():
        return range(start, start + len(text) + 1)
    places = [start + index for index, char in enumerate(text) for _ in char.encode()]
    return [*places, start + len(text)]
