"""Bytes of single tokens, for each notation of vocabularies: byte alphabets, word marks, <0xNN>.

For a `tokenizers` decoder, the library itself decodes each token once, so its rules are not repeated here. Decoders
that need more than one token at a time are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE; an added token with other characters is its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
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
