"""Jane Austen's six novels from the Debian package r-cran-janeaustenr, one text file each.

    apt-get download r-cran-janeaustenr=1.0.0-1
    python -m antiphon.model.training.corpora.jane_austen r-cran-janeaustenr_1.0.0-1_all.deb DATA

The novels are in the public domain; the collection is by Julia Silge, under the MIT licence. A novel has one paragraph
a line and a blank line between paragraphs.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

PACKAGE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
FOLDER = "jane-austen"
_NOVELS = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_AR_MAGIC, _AR_HEADER_LEN = b"!<arch>\n", 60
# Serialised R object: format "X\n", three versions, the length of the encoding's name, and the name.
_R_HEADER_LEN = 2 + 3 * 4 + 4 + len("UTF-8")
_R_STRINGS, _R_STRING = 16, 9  # types of a character vector and of an element, in the low byte of the flags


class PackageError(Exception):
    """The package cannot be read; the message names the file."""


def novels(package: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text of each novel in a .deb file. Raises PackageError if it is not the pinned version."""
    content = package.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != PACKAGE_SHA256:
        raise PackageError(f"{package} has sha256 {found[:12]}..., expected {PACKAGE_SHA256[:12]}... (version 1.0.0-1)")
    rest = _file_of_package(content, _NOVELS)
    while rest:  # an entry is the length of an object, and the compressed object
        inflating = zlib.decompressobj()
        lines = list(_strings(inflating.decompress(rest[4:])))
        rest = inflating.unused_data
        yield lines[0], "\n\n".join(_paragraphs(lines)) + "\n"


def _file_of_package(content: bytes, name: str) -> bytes:
    """Return a file of a .deb, which is an ar archive with data.tar.xz."""
    place = len(_AR_MAGIC)
    while place < len(content):
        header = content[place : place + _AR_HEADER_LEN]
        start, size = place + _AR_HEADER_LEN, int(header[48:58])
        if header.startswith(b"data.tar.xz"):
            data = lzma.decompress(content[start : start + size])
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                member = archive.extractfile(name)
                assert member is not None
                return member.read()
        place = start + size + size % 2
    raise AssertionError("the pinned package has data.tar.xz")


def _strings(content: bytes) -> Iterator[str]:
    """Yield the elements of a serialised R character vector (R Internals, section 1.8)."""
    kind, count = struct.unpack_from(">ii", content, _R_HEADER_LEN)
    assert kind & 0xFF == _R_STRINGS
    place = _R_HEADER_LEN + 8
    for _ in range(count):
        kind, length = struct.unpack_from(">ii", content, place)
        assert kind & 0xFF == _R_STRING
        yield content[place + 8 : place + 8 + length].decode("utf-8")
        place += 8 + length


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Yield paragraphs, whose lines are joined by spaces."""
    for is_text, group in groupby(lines, key=lambda line: bool(line.strip())):
        if is_text:
            yield " ".join(line.strip() for line in group)


def write_novels(package: Path, data: Path) -> list[Path]:
    """Write the novels below the data folder and return the files."""
    texts = {data / FOLDER / f"{title.lower().replace(' ', '-')}.txt": text for title, text in novels(package)}
    (data / FOLDER).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(texts)


def main(arguments: list[str]) -> int:
    """Write the novels; return 0, or 2 after an error with one line on standard error."""
    if len(arguments) != 2:
        print("usage: python -m antiphon.model.training.corpora.jane_austen PACKAGE.deb DATA", file=sys.stderr)
        return 2
    try:
        written = write_novels(Path(arguments[0]), Path(arguments[1]))
    except (PackageError, OSError) as error:
        print(f"jane_austen: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
