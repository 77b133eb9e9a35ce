"""Jane Austen's six novels from the Debian package r-cran-janeaustenr, one text file each.

The novels are in the public domain; the collection is by Julia Silge, under the MIT licence. A novel has one paragraph
a line and a blank line between paragraphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from antiphon.training.corpora.debian_archive import fetch, members
from antiphon.training.corpora.package_list import DebianPackage
from antiphon.training.corpora.r_objects import character_vectors

PACKAGE = DebianPackage(
    name="r-cran-janeaustenr",
    version="1.0.0-1",
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    files=("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
)


def write_novels(debs: Path, output: Path, package: DebianPackage = PACKAGE) -> list[Path]:
    """Write the novels into `output` and return the files. Raises CorpusError naming the package.

    debs: folder of the .deb files; a missing one is downloaded.
    """
    ((_, database),) = members(package, fetch(package, debs))
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for lines in character_vectors(database):
        path = output / f"{lines[0].lower().replace(' ', '-')}.txt"  # the first line is the title
        path.write_text("\n\n".join(_paragraphs(lines)) + "\n", encoding="utf-8", newline="\n")
        written.append(path)
    return written


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Yield paragraphs, whose lines are joined by spaces."""
    for is_text, group in groupby(lines, key=lambda line: bool(line.strip())):
        if is_text:
            yield " ".join(line.strip() for line in group)
