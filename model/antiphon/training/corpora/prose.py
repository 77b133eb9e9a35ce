"""Sentences of English prose from paragraphs: splitting, and leaving out code, lists, licences and other languages.

The rules are simple and deterministic. They prefer to lose a sentence over keeping one that is no prose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MIN_WORDS, MAX_WORDS = 4, 100
MAX_CODE_SHARE = 0.2
MIN_FUNCTION_SHARE = 0.15

_BOUNDARY = re.compile(r"""[.!?]+["”’')\]]*\s+(?=["“‘'(\[]?[A-Z])""")
_LAST_WORD = re.compile(r"(\S+)$")
_ABBREVIATION_LIST = """
e.g. i.e. cf. vs. etc. mr. mrs. ms. dr. prof. st. jr. sr. fig. figs. eq. sec. ch. vol. no. pp. ed. eds. al. inc. ltd.
co. corp. approx. resp. incl. esp. dept. jan. feb. mar. apr. jun. jul. aug. sep. sept. oct. nov. dec. lit. messrs. rev.
gen. col. capt. lt. sgt. viz.
"""
_FUNCTION_WORD_LIST = """
a about after all also an and any are as at be because been before but by can could did do does each for from had has
have he her his how i if in into is it its may more most must my no not of on one only or other our out over same she
should so some such than that the their them then there these they this those to under up use used was we were what when
where which while who will with would you your
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_LIST.split())
_FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())
_WORD_SIGNS = "\"“”'‘’()[],.;:!?…–—-"
_CODE = re.compile(r"""[_={}<>\\|@#$^*+~/&]|\w[.:]\w|\(\)|::|->|\d{3,}|[a-z][A-Z]""")
_ENDS = re.compile(r"""[.!?:]["”’')\]]*$""")
_STARTS = re.compile(r"""["“‘'(\[]?\w""")
_NOISE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff¶\x00-\x08\x0e-\x1f]")
_LICENCE = re.compile(
    r"permission is (hereby )?granted|without warranty|warranties|all rights reserved|redistribut|"
    r"free documentation license|general public license|creative commons|copyright (\(c\)|©|\d)|©|licen[sc]ed under",
    re.IGNORECASE,
)


def prose_of(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph that are English prose, in their order."""
    text = " ".join(_NOISE.sub("", paragraph).split())
    if _LICENCE.search(text):
        return []
    return [sentence for sentence in split_sentences(text) if is_prose(sentence)]


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text with single spaces; their concatenation with spaces is the text.

    A sentence ends at . ! or ? before a capital letter, except after an abbreviation or a single capital letter.
    """
    sentences = []
    start = 0
    for match in _BOUNDARY.finditer(text):
        last = _LAST_WORD.search(text[start : match.end()].rstrip())
        if last is not None and _is_abbreviation(last[1]):
            continue
        sentences.append(text[start : match.end()].strip())
        start = match.end()
    return [*sentences, text[start:]] if start < len(text) else sentences


def _is_abbreviation(word: str) -> bool:
    bare = word.strip("\"“”'‘’()[]")
    return bare.lower() in _ABBREVIATIONS or (len(bare) == 2 and bare[0].isupper() and bare != "I.")


def is_prose(sentence: str) -> bool:
    """Return whether a sentence is complete, of a usual length, in English, and mostly words rather than code."""
    words = sentence.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS or not _ENDS.search(sentence) or not _STARTS.match(sentence):
        return False
    return _share_of_code(words) <= MAX_CODE_SHARE and _share_of_function_words(words) >= MIN_FUNCTION_SHARE


def _share_of_code(words: Sequence[str]) -> float:
    bare = [word.strip(_WORD_SIGNS) for word in words]
    return sum(1 for word in bare if not word or _CODE.search(word)) / len(words)


def _share_of_function_words(words: Sequence[str]) -> float:
    return sum(1 for word in words if word.strip(_WORD_SIGNS).lower() in _FUNCTION_WORDS) / len(words)
