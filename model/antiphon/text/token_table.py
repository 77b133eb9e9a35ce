"""Token table: bytes of each token id in every notation, and decoding of ids to text, at once or incrementally.

After other tokens a token represents a fixed string of bytes. At the beginning of a text it can represent another one.
White space at the ends of a text can be removed. So texts can be streamed: a delta never ends inside a character, and
the concatenated deltas are equal to the text decoded at once.

For a `tokenizers` decoder, the library itself decodes each token once, so its rules are not repeated here. Decoders
that need more than one token at a time are refused. Imports no torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer, models

from antiphon.errors import TokenizerError

WORD_MARK = "\u2581"  # SentencePiece's symbol for a space (Kudo & Richardson 2018)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKEN_BY_TOKEN = {"WordPiece", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "Sequence"}


@dataclass(frozen=True, slots=True)
class TokenDecoding:
    """Functions from a token to its bytes.

    rest: for a token after other tokens. first: for the first token of a text; None: the same as rest.
    """

    rest: Callable[[str], bytes]
    first: Callable[[str], bytes] | None = None


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE (Radford et al. 2019).

    A printable byte is its own character; the other bytes have characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(unprintable)})
    return alphabet


def alphabet_bytes(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE. Raises KeyError for a character outside the alphabet."""
    alphabet = byte_alphabet()
    return bytes([alphabet[char] for char in token])


def byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE; an added token with other characters is its own text."""
    try:
        return alphabet_bytes(token)
    except KeyError:
        return token.encode()


def byte_piece(token: str) -> bytes | None:
    """Return the byte of a <0xNN> token; None for any other token."""
    match = _BYTE_PIECE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def space_before(token: str) -> bytes:
    """Return the bytes of a word with a space before it."""
    return b" " + token.encode()


def word_marked(token: str) -> bytes:
    """Return the bytes of a SentencePiece piece: the word mark becomes a space."""
    return token.replace(WORD_MARK, " ").encode()


def token_decoding_of(described: Mapping[str, Any] | None) -> TokenDecoding:
    """Return the token decoding of the `decoder` object of a tokenizer.json.

    None means words between spaces. Raises TokenizerError for a decoder that needs more than one token at a time,
    because its text cannot be streamed.
    """
    if described is None:
        return TokenDecoding(space_before, str.encode)
    steps = list(_steps(described))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoding(byte_level)
    for step in steps:
        kind = step.get("type")
        if kind not in _TOKEN_BY_TOKEN or (kind == "Strip" and step["stop"]):
            raise TokenizerError(f"its decoder {kind!r} does not decode tokens one by one, so texts cannot be streamed")
    return _decoding_by(_decoder_of(described), has_bytes="ByteFallback" in kinds)


def _steps(described: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if described.get("type") == "Sequence":
        for step in described["decoders"]:
            yield from _steps(step)
    else:
        yield described


def _decoder_of(described: Mapping[str, Any]) -> Any:
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "decoder": described})).decoder


def _decoding_by(decoder: Any, *, has_bytes: bool) -> TokenDecoding:
    """Return a decoding that calls the library's decoder with a token after another one, or with the token alone."""
    before = "a"
    skipped = len(decoder.decode([before]))

    def rest(token: str) -> bytes:
        byte = byte_piece(token) if has_bytes else None
        text: str = decoder.decode([before, token]) if byte is None else ""
        return text[skipped:].encode() if byte is None else byte

    def first(token: str) -> bytes:
        byte = byte_piece(token) if has_bytes else None
        if byte is not None and byte[0] >= 0x80:
            return byte
        text: str = decoder.decode([token])
        return text.encode()

    return TokenDecoding(rest, first)


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")  # looked up once, because every request creates several

Strips = Literal["nothing", "one space", "leading spaces", "white space"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """Tokens of source or target, by id.

    pieces: name of each token; "" for an id without a token.
    texts: bytes of each token after other tokens; empty for special tokens.
    first: function from a piece to its bytes at the beginning of a text; None: the same bytes as `texts`.
    special: ids of tokens without text; the next token is still the first of the text.
    strips: removed from a text: "white space" at both ends; "one space" and "leading spaces" at the beginning.
    errors: treatment of invalid UTF-8: "replace" by U+FFFD, or "ignore".
    """

    pieces: Sequence[str]
    texts: Sequence[bytes]
    special: frozenset[int]
    first: Callable[[str], bytes] | None = None
    strips: Strips = "nothing"
    errors: Literal["replace", "ignore"] = "replace"

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids after other tokens; ids beyond the table (a padded vocabulary) add none."""
        texts, size = self.texts, len(self.texts)
        return b"".join([texts[index] for index in ids if index < size])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        stream = IncrementalDecoder(self)
        return stream.push(ids) + stream.finish()

    def piece(self, index: int) -> str:
        """Return one token for display: its text with leading space, a special token's name, or <0xNN> for bytes."""
        token_bytes = self.texts[index] if index < len(self.texts) else b""
        if not token_bytes:
            return (self.pieces[index] if index < len(self.pieces) else "") or f"<{index}>"
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in token_bytes)


def table_of(
    tokens: Iterable[tuple[str, int]],
    read: Callable[[str], bytes],
    special: Iterable[int],
    *,
    first: Callable[[str], bytes] | None = None,
    strips: Strips = "nothing",
    errors: Literal["replace", "ignore"] = "replace",
) -> TokenTable:
    """Return the table of (token, id) pairs; `read` gives the bytes of a token that is not special."""
    pairs, hidden = list(tokens), frozenset(special)
    size = 1 + max((index for _, index in pairs), default=-1)
    pieces, texts = [""] * size, [b""] * size
    for token, index in pairs:
        pieces[index] = token
        if index not in hidden:
            texts[index] = read(token)
    return TokenTable(pieces=pieces, texts=texts, special=hidden, first=first, strips=strips, errors=errors)


class IncrementalDecoder:
    """Decoder of one streamed output: the concatenated deltas are equal to `TokenTable.decode` of all ids.

    A character whose bytes are split between tokens is held until it is complete. White space that would be removed at
    the end of the text is held until more text follows.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = _Utf8Decoder(errors=table.errors)
        self._has_token = False
        self._has_text = False
        self._trailing_space = ""
        self._num_spaces = 0

    def skip_spaces(self, num_spaces: int) -> None:
        """Remove white space at the beginning of the following text, at most num_spaces characters."""
        self._num_spaces = num_spaces

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        text = self._pushed(ids)
        return self._without_spaces(text) if text and self._num_spaces else text

    def _pushed(self, ids: Iterable[int]) -> str:
        table = self._table
        if table.first is not None and not self._has_token:
            return self._emit(self._utf8.decode(self._beginning(list(ids), table.first)))
        return self._emit(self._utf8.decode(table.bytes_of(ids)))

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD for an incomplete character, else the empty string."""
        text = self._emit(self._utf8.decode(b"", final=True))
        return self._without_spaces(text) if text and self._num_spaces else text

    def _beginning(self, ids: Sequence[int], first: Callable[[str], bytes]) -> bytes:
        """Return the bytes of ids at the beginning of the text."""
        table = self._table
        for place, index in enumerate(ids):
            if index < len(table.pieces) and table.pieces[index] and index not in table.special:
                self._has_token = True
                return first(table.pieces[index]) + table.bytes_of(ids[place + 1 :])
        return b""

    def _without_spaces(self, text: str) -> str:
        skipped = min(self._num_spaces, len(text) - len(text.lstrip()))
        self._num_spaces = self._num_spaces - skipped if skipped == len(text) else 0
        return text[skipped:]

    def _emit(self, text: str) -> str:
        strips = self._table.strips
        if text and not self._has_text and strips != "nothing":
            text = _without_beginning(text, strips)
            self._has_text = bool(text) or strips == "one space"
        if strips != "white space":
            return text
        text = self._trailing_space + text
        kept = text.rstrip()
        self._trailing_space = text[len(kept) :]
        return kept


def _without_beginning(text: str, strips: Strips) -> str:
    if strips == "one space":
        return text.removeprefix(" ")
    return text.lstrip(" ") if strips == "leading spaces" else text.lstrip()
