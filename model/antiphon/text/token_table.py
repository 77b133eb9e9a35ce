"""Token table: bytes of each token id, and decoding of ids to text, at once or incrementally. Imports no torch.

After other tokens a token represents a fixed string of bytes. At the beginning of a text it can represent another one.
White space at the ends of a text can be removed. So texts can be streamed: a delta never ends inside a character, and
the concatenated deltas are equal to the text decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

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
        self._held = ""
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
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept


def _without_beginning(text: str, strips: Strips) -> str:
    if strips == "one space":
        return text.removeprefix(" ")
    return text.lstrip(" ") if strips == "leading spaces" else text.lstrip()
