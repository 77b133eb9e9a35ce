"""Sentence pairs from message catalogues: the format against Python's gettext, and which texts are kept."""

import gettext
import gzip
import struct
from io import BytesIO
from pathlib import Path

import pytest

from antiphon.errors import CorpusError
from antiphon.training.corpora.packages import Program, load_programs
from antiphon.training.corpora.pairs import catalogue_pairs, text_pairs, write_games
from tests.debian_packages import build_package, needs_dpkg

MESSAGES = {
    "": "Content-Type: text/plain; charset=UTF-8\n",
    "The city is old.": "Die Stadt ist alt.",
    "menu\x04Load the last game": "Den letzten Spielstand laden",
    "one small ship\0many small ships": "ein kleines Schiff\0viele kleine Schiffe",
}
PAIRS = [
    ("The city is old.", "Die Stadt ist alt."),
    ("Load the last game", "Den letzten Spielstand laden"),
    ("one small ship", "ein kleines Schiff"),
]


def catalogue(messages: dict[str, str], order: str = "<") -> bytes:
    """Return a message catalogue in little-endian (<) or big-endian (>) byte order."""
    count = len(messages)
    tables, texts = b"", b""
    start = 28 + 16 * count
    for side in (messages.keys(), messages.values()):
        for text in side:
            encoded = text.encode()
            tables += struct.pack(f"{order}2I", len(encoded), start + len(texts))
            texts += encoded + b"\0"
    return struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0) + tables + texts


@pytest.mark.parametrize("order", ["<", ">"])
def test_messages_are_those_of_gettext(order: str) -> None:
    content = catalogue(MESSAGES, order)
    reference = gettext.GNUTranslations(BytesIO(content))
    assert list(catalogue_pairs(content)) == PAIRS
    assert reference.gettext(PAIRS[0][0]) == PAIRS[0][1]
    assert reference.pgettext("menu", PAIRS[1][0]) == PAIRS[1][1]
    assert reference.ngettext("one small ship", "many small ships", 1) == PAIRS[2][1]


@pytest.mark.parametrize(
    "content",
    [b"", b"no catalogue", catalogue(MESSAGES)[:60], catalogue(MESSAGES).replace(b"Stadt", b"St\xe4dt")],
    ids=["empty", "text", "cut off", "latin-1"],
)
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a message catalogue in UTF-8"):
        list(catalogue_pairs(content))


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        (
            "He came in. He sat down.",
            "Er kam herein. Er setzte sich.",
            [("He came in.", "Er kam herein."), ("He sat down.", "Er setzte sich.")],
        ),
        (
            "The first part\n\nThe second part",
            "Der erste Teil\n\nDer zweite Teil",
            [("The first part", "Der erste Teil"), ("The second part", "Der zweite Teil")],
        ),
        ("Here is &quot;home&quot;", "Hier ist &quot;daheim&quot;", [('Here is "home"', 'Hier ist "daheim"')]),
        (
            "Hello <b>old</b><br>friend!",
            "Hallo <color_red>alter</color>\nFreund!",
            [("Hello old friend!", "Hallo alter Freund!")],
        ),
    ],
    ids=["sentences", "paragraphs", "escaped signs", "formatting"],
)
def test_texts_are_cut_and_without_formatting(source: str, target: str, pairs: list[tuple[str, str]]) -> None:
    assert list(text_pairs(source, target)) == pairs


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("He came in. He sat down.", "Er kam herein und setzte sich."),
        ("It is 90% full", "Es ist zu 90% voll"),
        ("Is this your dog?", "Ist das Ihr Hund?"),
        (
            "Yes. He came in from the cold rain with all of his friends and sat down.",
            "Er kam aus dem kalten Regen herein mit allen seinen Freunden und setzte sich. Ja.",
        ),
        ("Not much more to say", "Dazu gibt es hier nicht mehr viel zu sagen"),
    ],
)
def test_plain_text_is_kept(source: str, target: str) -> None:
    assert list(text_pairs(source, target)) == [(source, target)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("The first part\n\nThe second part", "Der erste und der zweite Teil", id="paragraphs"),
        pytest.param("You have %d gold pieces", "Du hast %d Goldstücke", id="place for a number"),
        pytest.param("Welcome back, $name", "Willkommen zurück, $name", id="place for a name"),
        pytest.param("<npcname> goes away", "<npcname> geht weg", id="place in brackets"),
        pytest.param("It costs 20 coins", "Es kostet 30 Münzen", id="other number"),
        pytest.param("Commodore 64 Basic", "Commodore 64 Basic", id="not translated"),
        pytest.param("Old town", "Die alte Stadt", id="two words"),
        pytest.param("Where do you come from?", "Woher kommt Ihr?", id="old address"),
        pytest.param(
            "Not much to say", "Dazu gibt es hier wirklich sehr viel mehr zu sagen, als man meint", id="longer"
        ),
        pytest.param("so very " * 41, "so sehr " * 41, id="82 words"),
    ],
)
def test_other_texts_are_left_out(source: str, target: str) -> None:
    assert list(text_pairs(source, target)) == []


@needs_dpkg
def test_each_program_has_a_file_and_each_pair_is_in_one(tmp_path: Path) -> None:
    file = "usr/share/locale/de/LC_MESSAGES/toy.mo"
    content = catalogue({**MESSAGES, "book\x04The city is old.": "Die Stadt ist alt."})
    package = {**build_package(tmp_path, {file: content}), "files": ["*/de/LC_MESSAGES/*.mo"]}
    programs = [
        Program.model_validate({"name": name, "licence": "MIT", "package": [package]}) for name in ("one", "two")
    ]
    written = write_games(programs, tmp_path, tmp_path / "data")
    assert {path.name: gzip.decompress(path.read_bytes()).decode() for path in written} == {
        "one.en-de.tsv.gz": "".join(f"{source}\t{target}\n" for source, target in PAIRS),
        "two.en-de.tsv.gz": "",
    }


@needs_dpkg
def test_a_broken_catalogue_is_named(tmp_path: Path) -> None:
    package = {**build_package(tmp_path, {"usr/toy.mo": b"broken"}), "files": ["usr/*"]}
    program = Program.model_validate({"name": "toy", "licence": "MIT", "package": [package]})
    with pytest.raises(CorpusError, match=r"toy-doc_.*usr/toy\.mo: not a message catalogue"):
        write_games([program], tmp_path, tmp_path / "data")


def test_programs_and_packages_are_named_once() -> None:
    programs = load_programs()
    packages = [package.name for program in programs for package in program.package]
    assert len({program.name for program in programs}) == len(programs)
    assert len(set(packages)) == len(packages)


def test_a_wrong_list_is_refused_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text('[[program]]\nname = "toy"\nlicence = "MIT"\npackage = []\n')
    with pytest.raises(CorpusError, match=r"list\.toml: program\.0\.package"):
        load_programs(path)
