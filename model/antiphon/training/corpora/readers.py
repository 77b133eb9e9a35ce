"""Readers: contents of a file to documents, one function for each format. A document is a list of paragraphs.

html, xml   markup.py
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
from collections.abc import Callable, Iterator, Mapping

from antiphon.training.corpora.markup import paragraphs_of
from antiphon.training.corpora.package_list import ReaderName
from antiphon.training.corpora.r_objects import character_vectors

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
    while (shorter := _POD_CODE.sub(lambda found: (found[1] or found[2] or "").partition("|")[0], text)) != text:
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
