"""English-German sentence pairs from games in Debian: their stories, dialogues and encyclopaedias.

The packages are pinned by version and SHA-256 in debian_games.toml. The same packages give the same bytes.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.errors import CorpusError
from antiphon.training.corpora.debian_archive import fetch, members
from antiphon.training.corpora.message_catalogues import catalogue_pairs
from antiphon.training.corpora.package_list import Program
from antiphon.training.data.corpus import Pair


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
        path = output / f"{program.name}.en-de.tsv.gz"
        path.write_bytes(gzip.compress("".join(f"{source}\t{target}\n" for source, target in new).encode(), mtime=0))
        written.append(path)
    return written


def _pairs(program: Program, debs: Path) -> Iterator[Pair]:
    for package in program.package:
        path = fetch(package, debs)
        for name, content in members(package, path):
            try:
                yield from catalogue_pairs(content)
            except ValueError as error:
                raise CorpusError(f"{path}: {name}: {error}") from None
