"""Corpus of English prose for pre-training, from Debian's documentation packages.

The packages are pinned by version and SHA-256 in debian_docs.toml. The same packages give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.errors import CorpusError
from antiphon.training.corpora.debian_archive import fetch, members
from antiphon.training.corpora.package_list import Package
from antiphon.training.corpora.prose import prose_of
from antiphon.training.corpora.readers import READERS, Document

MIN_SENTENCES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageCounts:
    """Size of one package's part of the corpus."""

    package: Package
    documents: int
    sentences: int
    words: int

    @property
    def row(self) -> str:
        """Return the counts as a line of the table."""
        package = self.package
        fields = (package.name, package.version, package.licence, self.documents, self.sentences, self.words)
        return "\t".join(map(str, fields))


class Paragraphs:
    """Paragraphs that have been used; equal ones, apart from digits and signs, are used only once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, paragraph: str) -> bool:
        """Return whether the paragraph has not been used yet, and mark it as used."""
        letters = "".join(filter(str.isalpha, paragraph.lower()))
        digest = hashlib.blake2b(letters.encode(), digest_size=8).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def write_corpus(packages: Sequence[Package], debs: Path, output: Path) -> tuple[Path, list[PackageCounts]]:
    """Write documents.txt.gz and packages.tsv to `output`; return the first one and the counts of each package.

    debs: folder of the .deb files; missing ones are downloaded. Raises CorpusError naming the package or file.
    """
    output.mkdir(parents=True, exist_ok=True)
    target = output / "documents.txt.gz"
    unfinished = target.with_name(f".{target.name}.tmp")
    used = Paragraphs()
    counts = []
    with unfinished.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
        for package in packages:
            documents = list(_documents(package, fetch(package, debs), used))
            stream.write("".join("\n".join([*document, "\n"]) for document in documents).encode())
            counts.append(_counted(package, documents))
    unfinished.replace(target)
    header = "package\tversion\tlicence\tdocuments\tsentences\twords\n"
    table = header + "".join(f"{count.row}\n" for count in counts)
    (output / "packages.tsv").write_text(table, encoding="utf-8")
    return target, counts


def _documents(package: Package, path: Path, used: Paragraphs) -> Iterator[Document]:
    """Yield the sentences of each document of a package. Raises CorpusError naming a file that cannot be read."""
    read = READERS[package.reader]
    for name, content in members(package, path):
        try:
            documents = read(content)
        except Exception as error:  # a reader can meet any defect of a file
            raise CorpusError(f"{path}: {name} cannot be read as {package.reader}: {error!r}") from None
        for document in documents:
            sentences = [sentence for part in document if used.is_new(part) for sentence in prose_of(part)]
            if len(sentences) >= MIN_SENTENCES:
                yield sentences


def _counted(package: Package, documents: Sequence[Document]) -> PackageCounts:
    sentences = [sentence for document in documents for sentence in document]
    return PackageCounts(
        package=package,
        documents=len(documents),
        sentences=len(sentences),
        words=sum(len(sentence.split()) for sentence in sentences),
    )
