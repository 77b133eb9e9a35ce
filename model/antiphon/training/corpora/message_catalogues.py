"""Sentence pairs from message catalogues of gettext (.mo): texts of a program with their translations.

Only plain text is kept. A program's texts also have formatting, which is removed, and places for names and numbers, for
which a pair is left out. A text of several sentences is cut where both languages have the same number of them.
"""

from __future__ import annotations

import html
import re
import struct
from collections.abc import Iterator

from antiphon.training.corpora.prose import split_sentences
from antiphon.training.data.corpus import Pair

MIN_WORDS, MAX_WORDS = 3, 80
MAX_LENGTH_RATIO = 2.0

_BYTE_ORDERS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_CONTEXT_END = "\x04"
_BREAK = re.compile(r"</?(?:br|center|h[1-6]|header|li|list|ol|p|ul)\b[^>]*>", re.IGNORECASE)
_STYLE = re.compile(
    r"</?(?:a|b|bad|big|bold|code|color|em|format|good|i|info|italic|neutral|small|span|strong|tt|u)(?:\b|_)[^>]*>",
    re.IGNORECASE,
)
_UNCLEAR = re.compile(r"""[<>{}\[\]\\|=_@~#^$*`&]|%[^\s.,;:!?)]|https?:|www\.|\w\(\)|^\W*$""")
_PARAGRAPHS = re.compile(r"\s*\n\s*\n\s*")
_NUMBERS = re.compile(r"\d+")
# The polite address of old stories, which a user of today would not expect.
_OLD_ADDRESS = re.compile(r"\bEu(?:ch|er|re[mnrs]?)\b|\bIhr [a-zäöüß]+t\b|\bIhr seid\b|[a-zäöüß]t Ihr\b|\bseid Ihr\b")


def catalogue_pairs(content: bytes) -> Iterator[Pair]:
    """Yield English and German sentences of a message catalogue, in its order. Raises ValueError if it is none."""
    for source, target in _messages(content):
        yield from text_pairs(source, target)


def _messages(content: bytes) -> Iterator[Pair]:
    """Yield each message and its translation in UTF-8, of plural forms the first, without the context.

    The header is the translation of the empty message. Format: GNU gettext manual, "The Format of GNU MO Files".
    """
    try:
        order = _BYTE_ORDERS[content[:4]]
        count, sources, targets = struct.unpack_from(f"{order}3I", content, 8)
        for index in range(count):
            source, target = (_text(content, order, table + 8 * index) for table in (sources, targets))
            yield source.rpartition(_CONTEXT_END)[2], target
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a message catalogue in UTF-8: {error!r}") from None


def _text(content: bytes, order: str, entry: int) -> str:
    length, start = struct.unpack_from(f"{order}2I", content, entry)
    return content[start : start + length].partition(b"\0")[0].decode("utf-8")


def text_pairs(source: str, target: str) -> Iterator[Pair]:
    """Yield the sentence pairs of a text and its translation."""
    sources, targets = _PARAGRAPHS.split(source.strip()), _PARAGRAPHS.split(target.strip())
    if len(sources) != len(targets):
        return
    for paragraph in zip(map(_plain, sources), map(_plain, targets), strict=True):
        parts = [split_sentences(text) for text in paragraph]
        is_cut = len(parts[0]) == len(parts[1]) and all(map(_fits, *parts))
        yield from filter(_is_clear, zip(*parts, strict=True) if is_cut else [paragraph])


def _plain(text: str) -> str:
    """Return a text on one line, without formatting."""
    return " ".join(html.unescape(_STYLE.sub("", _BREAK.sub(" ", text))).split())


def _is_clear(pair: Pair) -> bool:
    """Return whether a pair is plain text of a usual length, in two languages, with the same numbers."""
    source, target = pair
    if source == target or any(_UNCLEAR.search(text) for text in pair) or _OLD_ADDRESS.search(target):
        return False
    is_long_enough = len(source.split()) >= MIN_WORDS and all(len(text.split()) <= MAX_WORDS for text in pair)
    return is_long_enough and _fits(source, target) and _numbers(source) == _numbers(target)


def _fits(source: str, target: str) -> bool:
    """Return whether a translation is at most twice as long as its source, or half as long; 20 letters are free."""
    shorter, longer = sorted((len(source), len(target)))
    return longer <= MAX_LENGTH_RATIO * shorter + 20


def _numbers(text: str) -> list[str]:
    return sorted(_NUMBERS.findall(text))
