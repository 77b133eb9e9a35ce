"""Sentence pairs and word pairs of Ding, a German-English dictionary (Frank Richter, TU Chemnitz, GPL-2+).

A line is `German :: English`. Each side has the same number of items between `|`: the headword, its forms, and
examples. An item has synonyms between `;`. Notes in brackets and abbreviations in slashes do not belong to the text:

    Dienst {m} (im Staat) [adm.] | höherer Dienst; gehobener Dienst :: service | senior service
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from antiphon.model.training.data.corpus import Pair

_NOTES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|(?:(?<=\s)|^)/[^/]{1,24}/")
_ONE_OF_TWO_WORDS = re.compile(r"(\w+)/\w+")
_PLACEHOLDERS = {
    "sb.": "somebody", "sb.’s": "somebody’s", "sth.": "something", "sth.’s": "something’s",
    "jd.": "jemand", "jdn.": "jemanden", "jdm.": "jemandem", "jds.": "jemandes", "etw.": "etwas",
}  # fmt: skip
_UNCLEAR = re.compile(r"[<>{}\[\]()/|~=*_…+]|\.\.|\b(?:jdn|jdm|jds|sb|sth|etw)\b\.?")
_MAX_WORDS = 60
_SENTENCE_WORDS = 4


def ding_pairs(lines: Iterable[str]) -> list[Pair]:
    """Return the pairs of English and German text of a dictionary's lines, each once, in their order."""
    return list(dict.fromkeys(pair for line in lines for pair in _pairs_of(line)))


def is_sentence(pair: Pair) -> bool:
    """Return whether a pair is a phrase or sentence, not a word: at least four words on each side."""
    return all(len(text.split()) >= _SENTENCE_WORDS for text in pair)


def _pairs_of(line: str) -> Iterator[Pair]:
    german, separator, english = line.partition("::")
    items = list(zip(english.split("|"), german.split("|"), strict=False))
    if line.startswith("#") or not separator or german.count("|") != english.count("|"):
        return
    for item in items:
        sources, targets = (_synonyms(side) for side in item)
        if not targets:
            continue
        for index, source in enumerate(sources):
            yield source, targets[min(index, len(targets) - 1)]


def _synonyms(item: str) -> list[str]:
    """Return the clear texts between semicolons, without notes."""
    return [text for text in map(_plain, _NOTES.sub(" ", item).split(";")) if text]


def _plain(text: str) -> str:
    """Return a text with placeholders written out, or nothing if it is not a plain text."""
    words = [_PLACEHOLDERS.get(word, word) for word in _ONE_OF_TWO_WORDS.sub(r"\1", text).split()]
    plain = " ".join(words).strip(" ,")
    return "" if _UNCLEAR.search(plain) or len(words) > _MAX_WORDS else plain
