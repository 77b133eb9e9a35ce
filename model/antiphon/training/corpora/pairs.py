"""Corpora of English-German sentence pairs: texts of games in Debian, and the dictionary Ding.

The games are listed in debian_games.toml: their stories, dialogues and encyclopaedias are in message catalogues of
gettext (.mo), texts of a program with their translations. Only plain text is kept. A program's texts also have
formatting, which is removed, and places for names and numbers, for which a pair is left out. A text of several
sentences is cut where both languages have the same number of them.

Ding (Frank Richter, TU Chemnitz, GPL-2+) has sentence pairs and word pairs. A line is `German :: English`. Each side
has the same number of items between `|`: the headword, its forms, and examples. An item has synonyms between `;`. Notes
in brackets and abbreviations in slashes do not belong to the text:

    Dienst {m} (im Staat) [adm.] | höherer Dienst; gehobener Dienst :: service | senior service
"""

from __future__ import annotations

import gzip
import html
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from antiphon.errors import CorpusError
from antiphon.training.corpora.documents import split_sentences
from antiphon.training.corpora.packages import DebianPackage, Program, fetch, members
from antiphon.training.corpus import Pair

MIN_MESSAGE_WORDS, MAX_MESSAGE_WORDS = 3, 80
MAX_LENGTH_RATIO = 2.0

_BYTE_ORDERS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_CONTEXT_END = "\x04"
_BREAK = re.compile(r"</?(?:br|center|h[1-6]|header|li|list|ol|p|ul)\b[^>]*>", re.IGNORECASE)
_STYLE = re.compile(
    r"</?(?:a|b|bad|big|bold|code|color|em|format|good|i|info|italic|neutral|small|span|strong|tt|u)(?:\b|_)[^>]*>",
    re.IGNORECASE,
)
_UNCLEAR_MESSAGE = re.compile(r"""[<>{}\[\]\\|=_@~#^$*`&]|%[^\s.,;:!?)]|https?:|www\.|\w\(\)|^\W*$""")
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
    for paragraph in zip(map(_message_text, sources), map(_message_text, targets), strict=True):
        parts = [split_sentences(text) for text in paragraph]
        is_cut = len(parts[0]) == len(parts[1]) and all(map(_fits, *parts))
        yield from filter(_is_clear, zip(*parts, strict=True) if is_cut else [paragraph])


def _message_text(text: str) -> str:
    """Return a text on one line, without formatting."""
    return " ".join(html.unescape(_STYLE.sub("", _BREAK.sub(" ", text))).split())


def _is_clear(pair: Pair) -> bool:
    """Return whether a pair is plain text of a usual length, in two languages, with the same numbers."""
    source, target = pair
    if source == target or any(_UNCLEAR_MESSAGE.search(text) for text in pair) or _OLD_ADDRESS.search(target):
        return False
    is_long_enough = len(source.split()) >= MIN_MESSAGE_WORDS and all(
        len(text.split()) <= MAX_MESSAGE_WORDS for text in pair
    )
    return is_long_enough and _fits(source, target) and _numbers(source) == _numbers(target)


def _fits(source: str, target: str) -> bool:
    """Return whether a translation is at most twice as long as its source, or half as long; 20 letters are free."""
    shorter, longer = sorted((len(source), len(target)))
    return longer <= MAX_LENGTH_RATIO * shorter + 20


def _numbers(text: str) -> list[str]:
    return sorted(_NUMBERS.findall(text))


def _write(pairs: Iterable[Pair], output: Path, name: str) -> Path:
    """Write a line English<TAB>German of each pair; return the file."""
    path = output / f"{name}.en-de.tsv.gz"
    path.write_bytes(gzip.compress("".join(f"{source}\t{target}\n" for source, target in pairs).encode(), mtime=0))
    return path


def write_games(programs: Sequence[Program], debs: Path, output: Path) -> list[Path]:
    """Write NAME.en-de.tsv.gz of each program into `output`; return the files in the order of the programs.

    A line is English<TAB>German. A pair is in one file, and there once. debs: folder of the .deb files; missing ones
    are downloaded. Raises CorpusError naming the package or file.
    """
    output.mkdir(parents=True, exist_ok=True)
    used: set[Pair] = set()
    written = []
    for program in programs:
        new = [pair for pair in dict.fromkeys(_pairs(program, debs)) if pair not in used]
        used.update(new)
        written.append(_write(new, output, program.name))
    return written


def _pairs(program: Program, debs: Path) -> Iterator[Pair]:
    for package in program.package:
        path = fetch(package, debs)
        for name, content in members(package, path):
            try:
                yield from catalogue_pairs(content)
            except ValueError as error:
                raise CorpusError(f"{path}: {name}: {error}") from None


DING_PACKAGE = DebianPackage(
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
_UNCLEAR_ENTRY = re.compile(r"[<>{}\[\]()/|~=*_…+]|\.\.|\b(?:jdn|jdm|jds|sb|sth|etw)\b\.?")
_MAX_ENTRY_WORDS = 60
_SENTENCE_WORDS = 4


def write_pairs(debs: Path, output: Path, package: DebianPackage = DING_PACKAGE) -> list[Path]:
    """Write sentences.en-de.tsv.gz and words.en-de.tsv.gz into `output`; return both.

    A line is English<TAB>German. debs: folder of the .deb files; a missing one is downloaded. Raises CorpusError naming
    the package.
    """
    ((_, content),) = members(package, fetch(package, debs))
    pairs = ding_pairs(content.decode("utf-8").splitlines())
    output.mkdir(parents=True, exist_ok=True)
    sentences, words = filter(is_sentence, pairs), (pair for pair in pairs if not is_sentence(pair))
    return [_write(sentences, output, "sentences"), _write(words, output, "words")]


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
    return [text for text in map(_entry_text, _NOTES.sub(" ", item).split(";")) if text]


def _entry_text(text: str) -> str:
    """Return a text with placeholders written out, or nothing if it is not a plain text."""
    words = [_PLACEHOLDERS.get(word, word) for word in _ONE_OF_TWO_WORDS.sub(r"\1", text).split()]
    plain = " ".join(words).strip(" ,")
    return "" if _UNCLEAR_ENTRY.search(plain) or len(words) > _MAX_ENTRY_WORDS else plain
