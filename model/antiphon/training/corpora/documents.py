"""Corpora of English text: prose of Debian's documentation packages for pre-training, and Jane Austen's six novels.

The documentation packages are listed in debian_docs.toml. Prose is what remains without code, lists, licences and other
languages. Its rules are simple and deterministic. They prefer to lose a sentence over keeping one that is no prose.

The novels are in the public domain; the collection is by Julia Silge, under the MIT licence. A novel has one paragraph
a line and a blank line between paragraphs.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from antiphon.errors import CorpusError
from antiphon.training.corpora.packages import DebianPackage, Package, fetch, members
from antiphon.training.corpora.readers import READERS, Document, character_vectors

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


NOVELS_PACKAGE = DebianPackage(
    name="r-cran-janeaustenr",
    version="1.0.0-1",
    sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    files=("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
)


def write_novels(debs: Path, output: Path, package: DebianPackage = NOVELS_PACKAGE) -> list[Path]:
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
