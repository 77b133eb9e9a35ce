"""What each token id stands for, and how tokens join to a text, whole or as they come. Torch-free.

Every token stands for a fixed string of bytes behind others, and maybe for another one at the beginning of a text;
white space at the ends may go. So a text can be streamed: deltas never hold half a character, and join to the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")  # looked up once: every request makes some

Strips = Literal["nothing", "one space", "leading spaces", "white space"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTable:
    """The tokens of one side, by id.

    pieces: what each is called; "" for an id without a token.
    texts: bytes that each stands for behind others; nothing for special ones.
    first: bytes that a piece stands for where it begins a text; None: the same.
    special: ids that stand for nothing, and leave what follows the beginning of the text.
    strips: what goes from the ends of a text: "white space" at both ends, the others at its beginning.
    errors: what becomes of bytes that are no UTF-8: "replace" makes U+FFFD of them, "ignore" nothing.
    """

    pieces: Sequence[str]
    texts: Sequence[bytes]
    special: frozenset[int]
    first: Callable[[str], bytes] | None = None
    strips: Strips = "nothing"
    errors: Literal["replace", "ignore"] = "replace"

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """What ids stand for behind others. Ids above the table's, of a padded vocabulary, stand for nothing."""
        texts, size = self.texts, len(self.texts)
        return b"".join([texts[index] for index in ids if index < size])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        stream = IncrementalDecoder(self)
        return stream.push(ids) + stream.finish()

    def piece(self, index: int) -> str:
        """One token to look at: its text, leading space included; a special token's name; bytes that are no text."""
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
    """The table of tokens and their ids; `read` says what a token that is not special stands for."""
    held, hidden = list(tokens), frozenset(special)
    size = 1 + max((index for _, index in held), default=-1)
    pieces, texts = [""] * size, [b""] * size
    for token, index in held:
        pieces[index] = token
        if index not in hidden:
            texts[index] = read(token)
    return TokenTable(pieces=pieces, texts=texts, special=hidden, first=first, strips=strips, errors=errors)


class IncrementalDecoder:
    """Turns ids that arrive in pieces into text deltas that concatenate to `TokenTable.decode` of all of them.

    A character whose bytes are split between tokens is held back until it is whole; so is white space that goes if
    nothing follows it.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = _Utf8Decoder(errors=table.errors)
        self._has_token = False
        self._has_text = False
        self._held = ""
        self._num_spaces = 0

    def skip_spaces(self, num_spaces: int) -> None:
        """Drop white space at the beginning of the further text, at most num_spaces characters."""
        self._num_spaces = num_spaces

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        text = self._pushed(ids)
        return self._without_spaces(text) if text and self._num_spaces else text

    def _pushed(self, ids: Iterable[int]) -> str:
        table = self._table
        if table.first is not None and not self._has_token:
            return self._emit(self._utf8.decode(self._beginning(list(ids), table.first)))
        return self._emit(self._utf8.decode(table.bytes_of(ids)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        text = self._emit(self._utf8.decode(b"", final=True))
        return self._without_spaces(text) if text and self._num_spaces else text

    def _beginning(self, ids: Sequence[int], first: Callable[[str], bytes]) -> bytes:
        """What ids stand for where no token came before them."""
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
