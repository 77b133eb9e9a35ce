"""What a token's spelling stands for, as each kind of vocabulary writes it: byte alphabets, word marks, <0xNN>.

A `tokenizers` decoder is asked token by token instead of imitated; those that look at more than one are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer, models

from antiphon.model.text.format import TokenizerError

WORD_MARK = "\u2581"  # SentencePiece's stand-in for a space (Kudo & Richardson 2018)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKEN_BY_TOKEN = {"WordPiece", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip", "Sequence"}


@dataclass(frozen=True, slots=True)
class Reading:
    """`rest`: bytes of a token behind others; `first`: of one that begins a text, None where that is the same."""

    rest: Callable[[str], bytes]
    first: Callable[[str], bytes] | None = None


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte of each printable stand-in of byte-level BPE (Radford et al. 2019); printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def byte_level(token: str) -> bytes:
    """Bytes of a token of byte-level BPE; one with other characters, added by hand, stands for itself."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def byte_piece(token: str) -> bytes | None:
    """The byte that a <0xNN> token stands for; None for any other."""
    found = _BYTE_PIECE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def spaced(token: str) -> bytes:
    """A word behind others."""
    return b" " + token.encode()


def word_marked(token: str) -> bytes:
    """Bytes of a SentencePiece piece."""
    return token.replace(WORD_MARK, " ").encode()


def reading_of(described: Mapping[str, Any] | None) -> Reading:
    """How the decoder of a tokenizer.json reads tokens. Raises TokenizerError for one that cannot be streamed."""
    if described is None:
        return Reading(spaced, str.encode)
    steps = list(_steps(described))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Reading(byte_level)
    for step in steps:
        kind = step.get("type")
        if kind not in _TOKEN_BY_TOKEN or (kind == "Strip" and step["stop"]):
            raise TokenizerError(f"its decoder {kind!r} does not read tokens one by one")
    return _asking(_decoder_of(described), has_bytes="ByteFallback" in kinds)


def _steps(described: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if described.get("type") == "Sequence":
        for step in described["decoders"]:
            yield from _steps(step)
    else:
        yield described


def _decoder_of(described: Mapping[str, Any]) -> Any:
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "decoder": described})).decoder


def _asking(decoder: Any, *, has_bytes: bool) -> Reading:
    """Asks the decoder itself what a token is behind another one, and alone."""
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

    return Reading(rest, first)
