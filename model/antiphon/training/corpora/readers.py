"""Readers: contents of a file to documents, one function for each format. A document is a list of paragraphs.

html, xml   running text of HTML and XML (DocBook, Mallard), without code, titles and menus
pod         Perl's documentation
backticks   strings between backticks, a conversation or description each (data of Endless Sky)
json        texts of JSON files: strings with several words
r_strings   vectors of strings in a database of R (.rdb); empty strings end paragraphs
dict        entries of a dictionary for dictd (.dict.dz)
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser

from antiphon.training.corpora.packages import ReaderName

_DROPPED_TAGS = """
script style pre nav header footer form h1 h2 h3 h4 h5 h6 title head address svg math button select textarea
programlisting screen synopsis literallayout cmdsynopsis funcsynopsis legalnotice info bookinfo articleinfo refmeta
refentryinfo indexterm listing code-block comment links desc citation credit
"""
_INLINE_TAGS = """
a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark q rp rt ruby s samp small span
strike strong sub sup time tt u var wbr
anchor link xref ulink emphasis command filename option literal replaceable application guilabel guimenu guimenuitem
guibutton keycap keycombo keysym userinput computeroutput systemitem varname constant function parameter type classname
envar prompt quote firstterm glossterm productname trademark foreignphrase citetitle email phrase inlinegraphic
mousebutton shortcut interface menuchoice
gui guiseq key keyseq sys file cmd output input app
"""
_DROPPED = frozenset(_DROPPED_TAGS.split())
_INLINE = frozenset(_INLINE_TAGS.split())


class _Paragraphs(HTMLParser):
    """Collects the text between the borders of block elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._dropped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a paragraph at a block element; begin to drop text at an element without running text."""
        if tag in _DROPPED:
            self._dropped.append(tag)
        if tag not in _INLINE:
            self.flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """End a paragraph at an empty block element of XML."""
        if tag not in _INLINE:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        """End the paragraph of a block element, and the dropping of text that its start began."""
        if tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        if tag not in _INLINE:
            self.flush()

    def handle_data(self, data: str) -> None:
        """Add text to the current paragraph."""
        if not self._dropped:
            self._parts.append(data)

    def flush(self) -> None:
        """End the current paragraph."""
        text = " ".join("".join(self._parts).split())
        self._parts = []
        if text:
            self.paragraphs.append(text)


def paragraphs_of(markup: str) -> list[str]:
    """Return the paragraphs of a document, each with single spaces. Broken markup is read as browsers do."""
    parser = _Paragraphs()
    parser.feed(markup)
    parser.close()
    parser.flush()
    return parser.paragraphs


_CHARACTER_VECTOR = 16
_HEADER_BYTES = 2 + 3 * 4 + 4 + len("UTF-8")  # format "X\n", three versions, length and name of the encoding


def character_vectors(database: bytes) -> Iterator[list[str]]:
    """Yield the strings of each character vector. Four bytes before each zlib stream have its full length."""
    while database:
        stream = zlib.decompressobj()
        serialised = stream.decompress(database[4:])
        database = stream.unused_data
        kind, count = struct.unpack_from(">II", serialised, _HEADER_BYTES)
        if kind & 0xFF == _CHARACTER_VECTOR:
            yield list(_r_strings(serialised, count))


def _r_strings(serialised: bytes, count: int) -> Iterator[str]:
    place = _HEADER_BYTES + 8
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialised, place + 4)  # -1 for a missing value
        place += 8 + max(0, length)
        yield serialised[place - max(0, length) : place].decode("utf-8")


Document = list[str]

_POD_OTHER = re.compile(r"[=\s]")
_POD_CODE = re.compile(r"[A-Z](?:<<+ (.*?) >>+|<([^<>]*)>)", re.DOTALL)
_CHAPTER = re.compile(r"(?:CHAPTER|Chapter|VOLUME)\b.{0,20}")


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _read_markup(content: bytes) -> list[Document]:
    return [paragraphs_of(_decoded(content))]


def _read_pod(content: bytes) -> list[Document]:
    """Return the paragraphs that are neither commands (=) nor code (indented)."""
    blocks = re.split(r"\n\s*\n", _decoded(content))
    return [[" ".join(_without_pod_codes(block).split()) for block in blocks if block and not _POD_OTHER.match(block)]]


def _without_pod_codes(text: str) -> str:
    """Replace codes such as C<text> by their text, inner ones first."""
    text = text.replace("E<lt>", "\x01").replace("E<gt>", "\x02")
    while (shorter := _POD_CODE.sub(lambda code: (code[1] or code[2] or "").partition("|")[0], text)) != text:
        text = shorter
    return text.replace("\x01", "<").replace("\x02", ">")


def _read_backticks(content: bytes) -> list[Document]:
    """Return a document for each top-level entry, which begins at a line without indentation."""
    entries = re.split(r"\n(?=\S)", _decoded(content))
    return [[" ".join(text.split()) for text in re.findall(r"`([^`]*)`", entry)] for entry in entries]


def _read_json(content: bytes) -> list[Document]:
    """Return one document with the strings of the file in their order; strings of fewer than six words are left out."""
    return [[" ".join(text.split()) for text in _strings(json.loads(content)) if len(text.split()) >= 6]]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _read_r_strings(content: bytes) -> list[Document]:
    """Return a document for each chapter of each vector."""
    return [chapter for lines in character_vectors(content) for chapter in _chapters(lines)]


def _chapters(lines: list[str]) -> list[Document]:
    """Return a document for each chapter; empty lines end paragraphs."""
    chapters: list[Document] = [[]]
    paragraph: list[str] = []
    for line in map(str.strip, [*lines, ""]):
        begins_chapter = _CHAPTER.fullmatch(line) is not None
        if line and not begins_chapter:
            paragraph.append(line)
            continue
        if paragraph:
            chapters[-1].append(" ".join(paragraph))
            paragraph = []
        if begins_chapter:
            chapters.append([])
    return chapters


def _read_dict(content: bytes) -> list[Document]:
    """Return a document for each entry: indented paragraphs after a line that is not indented."""
    entries = re.split(r"\n(?=\S)", gzip.decompress(content).decode("utf-8"))
    documents = []
    for entry in entries:
        blocks = re.split(r"\n\s*\n", entry.partition("\n")[2])
        documents.append([" ".join(re.sub(r"[{}]", "", block).split()) for block in blocks if block.strip()])
    return documents


READERS: Mapping[ReaderName, Callable[[bytes], list[Document]]] = {
    "html": _read_markup,
    "xml": _read_markup,
    "pod": _read_pod,
    "backticks": _read_backticks,
    "json": _read_json,
    "r_strings": _read_r_strings,
    "dict": _read_dict,
}
"""Function of each format, from the contents of a file to its documents."""
