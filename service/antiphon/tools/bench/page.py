"""Measurements as one page: `python -m antiphon.tools.bench.page docs/BENCHMARKS.md`.

Owns the format of docs/benchmarks. A file is one topic on one machine:

    {title, date, machine, commit, command, note, picture, sections}

`antiphon bench --json` writes such a file, without title, note and picture: put it into the folder and write the page
again. command is a line or a list of lines. picture is a file beside the page. A section is a `Finding`, or a table of
other figures: {name, title, note, columns, rows, beside}. title is the heading of the first column, and beside the
number of rows in one line of the page (1 by default).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from antiphon.tools.bench.report import HEADING, Finding, cells

MARKER = "<!-- Everything below is written by python -m antiphon.tools.bench.page docs/BENCHMARKS.md. -->\n"
FIELDS = ("date", "machine", "commit", "command", "sections")
"""Fields that every file must have."""


def updated(document: str, folder: Path) -> str:
    """Return the page with the measurements of the folder; the text before MARKER is unchanged.

    Raises ValueError if the page has no MARKER or a file lacks a field.
    """
    written, marker, _ = document.partition(MARKER)
    if not marker:
        raise ValueError(f"the page has no line {MARKER.strip()!r}")
    parts = (line for path in sorted(folder.glob("*.json")) for line in _part(path))
    return f"{written}{marker}" + "".join(f"{line}\n" for line in parts)


def _part(path: Path) -> Iterator[str]:
    """Return the lines of one file."""
    measured = json.loads(path.read_text(encoding="utf-8"))
    if missing := [field for field in FIELDS if not measured.get(field)]:
        raise ValueError(f"{path}: {missing[0]} is missing")
    yield from ("", f"## {measured.get('title', path.stem)}", "")
    origin = f"{measured['machine']}; {measured['date']}, commit {measured['commit']}."
    yield f"{origin} {measured.get('note', '')}".strip()
    command = measured["command"]
    yield from ("", *(f"    {line}" for line in ([command] if isinstance(command, str) else command)))
    if picture := measured.get("picture"):
        yield from ("", f"![{measured['title']}]({picture})")
    for is_table, sections in groupby(measured["sections"], key=lambda section: "columns" in section):
        if is_table:
            yield from (line for section in sections for line in _table(section))
        else:
            yield from ("", *_rows(HEADING, (cells(Finding(**section)) for section in sections)))


def _table(section: Mapping[str, Any]) -> Iterator[str]:
    if note := section.get("note"):
        yield from ("", note)
    headings, rows, beside = [section["title"], *section["columns"]], section["rows"], section.get("beside", 1)
    num_lines = -(-len(rows) // beside)
    padded = [*rows, *([""] * len(headings) for _ in range(num_lines * beside - len(rows)))]
    joined = ([cell for row in padded[line::num_lines] for cell in row] for line in range(num_lines))
    yield from ("", *_rows(headings * beside, joined))


def _rows(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (headings, ["---"] * len(headings), *rows):
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(updated(page.read_text(encoding="utf-8"), page.parent / "benchmarks"), encoding="utf-8")
