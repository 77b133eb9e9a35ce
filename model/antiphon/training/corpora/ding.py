"""Sentence pairs and word pairs of Ding, a German-English dictionary (Frank Richter, TU Chemnitz, GPL-2+).

A line is `German :: English`. Each side has the same number of items between `|`: the headword, its forms, and
examples. An item has synonyms between `;`. Notes in brackets and abbreviations in slashes do not belong to the text:

    Dienst {m} (im Staat) [adm.] | höherer Dienst; gehobener Dienst :: service | senior service
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from antiphon.training.corpora.debian_archive import fetch, members
from antiphon.training.corpora.package_list import DebianPackage
from antiphon.training.data.corpus import Pair

PACKAGE = DebianPackage(
    name="trans-de-en",
    version="1.9-6",
    sha256="45f6b4cf1c434776fba6811d7bc522efabb5425c43ba8afd0e289bf9e2e53df4",
    files=("usr/share/trans/de-en",),
)

_NOTES = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|(?:(?<=\s)|^)/[^/]{1,24}/")
_ONE_OF_TWO_WORDS = re.compile(r"(\w+)/\w+")
_PLACEHOLDERS = {
    "sb.": "somebody", "sb.’s": "somebody’s", "sth.": "something", "sth.’s": "something’s",
    "jd.": "jemand", "jdn.": "jemanden", "jdm.": "jemandem", "jds.": "jemandes", "etw.": "etwas",
}  # fmt: skip
_UNCLEAR = re.compile(r"[<>{}\[\]()/|~=*_…+]|\.\.|\b(?:jdn|jdm|jds|sb|sth|etw)\b\.?")
_MAX_WORDS = 60
_SENTENCE_WORDS = 4


def write_pairs(debs: Path, output: Path, package: DebianPackage = PACKAGE) -> list[Path]:
    """Write sentences.en-de.tsv.gz and words.en-de.tsv.gz into `output`; return both.

    A line is English<TAB>German. debs: folder of the .deb files; a missing one is downloaded. Raises CorpusError naming
    the package.
    """
    ((_, content),) = members(package, fetch(package, debs))
    pairs = ding_pairs(content.decode("utf-8").splitlines())
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, wanted in (("sentences", True), ("words", False)):
        lines = "".join(f"{source}\t{target}\n" for source, target in pairs if is_sentence((source, target)) == wanted)
        path = output / f"{name}.en-de.tsv.gz"
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
        written.append(path)
    return written


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
