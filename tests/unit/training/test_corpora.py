"""Corpora of Debian's documentation, of the dictionary Ding, of message catalogues and of novels."""

import gettext
import gzip
import hashlib
import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.main import main
from antiphon.errors import CorpusError
from antiphon.training.corpora import command
from antiphon.training.corpora.documents import (
    NOVELS_PACKAGE,
    Paragraphs,
    is_prose,
    prose_of,
    split_sentences,
    write_corpus,
    write_novels,
)
from antiphon.training.corpora.packages import DebianPackage, Package, Program, ReaderName, load_packages, load_programs
from antiphon.training.corpora.pairs import (
    DING_PACKAGE,
    catalogue_pairs,
    ding_pairs,
    is_sentence,
    text_pairs,
    write_games,
    write_pairs,
)
from antiphon.training.corpora.readers import READERS, paragraphs_of
from antiphon.training.corpus import read_documents
from antiphon.training.recipe import LanguageModelRecipe, TextFile, load_any_recipe
from tests.debian_packages import build_package, needs_dpkg

PAGE = """<!DOCTYPE html><html><head><title>Title</title><style>p { color: red }</style></head><body>
<nav><p>Up to the menu of all the pages.</p></nav>
<h1>A heading</h1><p>The <b>first</b> sentence of the
page &amp; its end. It has a second one, which is the last.<p>This paragraph was <br>never closed.
<pre>int main() { return 0; }</pre>
<ul><li>An item of the list is also a sentence.</li></ul></body></html>"""


def test_paragraphs_are_running_text_only() -> None:
    assert paragraphs_of(PAGE) == [
        "The first sentence of the page & its end. It has a second one, which is the last.",
        "This paragraph was",
        "never closed.",
        "An item of the list is also a sentence.",
    ]


def test_paragraphs_of_xml_have_no_titles_and_code() -> None:
    page = (
        "<page><info><desc>D</desc></info><title>T</title><p>Press <key>F1</key>.</p><code>no</code><p>Then</p></page>"
    )
    assert paragraphs_of(page)[0] == "Press F1."
    assert paragraphs_of("<screen>ls</screen><para>See <xref/> below.</para>") == ["See below."]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It runs. It stops.", ["It runs.", "It stops."]),
        ("Use a file, e.g. Makefile. See Dr. Smith.", ["Use a file, e.g. Makefile.", "See Dr. Smith."]),
        ('"Is it?" "It is!" he said.', ['"Is it?"', '"It is!" he said.']),
        ("Version 1.2 is old. 3 are new", ["Version 1.2 is old. 3 are new"]),
        (
            "J. S. Bach wrote it. (He did.) So did I. We sang.",
            ["J. S. Bach wrote it.", "(He did.)", "So did I.", "We sang."],
        ),
        ("", []),
    ],
)
def test_sentences_end_before_capital_letters(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.lists(st.sampled_from(["Dr.", "Yes!", "no", 'He?"', "A.", "(The", "end.)", "3.5", "..."]), max_size=30))
def test_sentences_together_are_the_text(words: list[str]) -> None:
    text = " ".join(words)
    assert " ".join(split_sentences(text)) == text


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The server reads its configuration from a file.", True),
        ("Calls to open() return the number of the file that was opened.", True),
        ("the lower case of an item is also a sentence.", True),
        ("Too short this.", False),
        ("The sentence has no end because it is a title", False),
        ("x = foo(bar); if (y == 3) return the_value[0] and a->b;", False),
        ("Der Server liest seine Einstellungen aus einer Datei.", False),
        ("Name Size Date Owner Group Mode Links Device Inode.", False),
        (" ".join(["the word"] * 60) + ".", False),
    ],
)
def test_prose_is_english_and_no_code(sentence: str, expected: bool) -> None:
    assert is_prose(sentence) == expected


def test_licences_are_left_out_as_whole_paragraphs() -> None:
    assert prose_of("This is a part of the text. Permission is granted to copy it as you like.") == []
    assert prose_of("You give the permission\u00ad to read the\u200b file.") == [
        "You give the permission to read the file."
    ]


def test_equal_paragraphs_are_used_once() -> None:
    used = Paragraphs()
    assert used.is_new("Return the value of field 1.")
    assert not used.is_new("return the value of field 2")
    assert used.is_new("Set the value of field 1.")


def r_strings(lines: Sequence[str]) -> bytes:
    """Serialise a character vector as R does: R Internals, section 1.8, version 3."""
    content = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(lines))
    for line in lines:
        content += struct.pack(">ii", 0x40009 if line.isascii() else 0x8009, len(line.encode())) + line.encode()
    return struct.pack(">i", len(content)) + zlib.compress(content)


BOOK = ["EMMA", "", "CHAPTER I", "", "Emma was", "handsome.", "", "She was clever.", "Chapter 2", "The end."]


@pytest.mark.parametrize(
    ("reader", "content", "documents"),
    [
        (
            "pod",
            b"=head1 NAME\n\nThe B<first I<inner>> text C<< $a->b >>.\n\n  code\n\nSee L<the manual|perlfunc> E<lt>now",
            [["The first inner text $a->b.", "See the manual <now"]],
        ),
        (
            "backticks",
            b"mission A\n\tdialog `Hello,\n\tyou.`\n\tchoice\n\t\t`Yes.`\nmission B\n\tdialog `Bye.`\n",
            [["Hello, you.", "Yes."], ["Bye."]],
        ),
        (
            "json",
            b'[{"id": "x", "text": ["one two three four five six", "short"]}, 3, null]',
            [["one two three four five six"]],
        ),
        ("r_strings", 2 * r_strings(BOOK), 2 * [["EMMA"], ["Emma was handsome.", "She was clever."], ["The end."]]),
        (
            "dict",
            gzip.compress(
                b"hack\n\n   1. {Quick} work\n   is done.\n\n   2. It ends.\n\nhacker\n n.\n\n    Someone.\n",
                mtime=0,  # the same test in every worker
            ),
            [["1. Quick work is done.", "2. It ends."], ["n.", "Someone."]],
        ),
    ],
)
def test_readers_give_prose_of_each_document(reader: ReaderName, content: bytes, documents: list[list[str]]) -> None:
    assert READERS[reader](content) == documents


def test_every_package_of_the_list_has_a_free_licence_and_a_reader() -> None:
    packages = load_packages()
    assert len({package.name for package in packages}) == len(packages) > 40
    assert all(package.licence.strip() for package in packages)
    assert {package.reader for package in packages} <= READERS.keys()


@pytest.mark.parametrize(("old", "new"), [("sha256 = ", "sha265 = "), ('reader = "html"', 'reader = "pdf"')])
def test_list_with_a_wrong_field_names_it(tmp_path: Path, old: str, new: str) -> None:
    text = (Path(command.__file__).parent / "debian_docs.toml").read_text()
    (tmp_path / "list.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(CorpusError, match=r"list\.toml: package\.0\.(sha256|reader)"):
        load_packages(tmp_path / "list.toml")


def deb(folder: Path, files: dict[str, bytes]) -> Package:
    described = dict(reader="html", files=["usr/share/doc/toy/en/*.html", "*.html.gz"], licence="GPL-2+")
    return Package.model_validate({**build_package(folder, files), **described})


def page(*paragraphs: str) -> bytes:
    return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs).encode()


@pytest.fixture
def toy(tmp_path: Path) -> Package:
    return deb(
        tmp_path,
        {
            "usr/share/doc/toy/en/b.html": page(
                "The second page is here. It ends with this.", "The end of the page is near."
            ),
            "usr/share/doc/toy/a.html.gz": gzip.compress(page("The first page is here. It is short, as you see.")),
            "usr/share/doc/toy/de/b.html": page("The wrong language is here. It is not read."),
            "usr/share/doc/toy/en/c.html": page("The second page is here. It ends with this.", "And so it is alone."),
        },
    )


@needs_dpkg
def test_corpus_has_documents_in_the_format_of_pretraining(toy: Package, tmp_path: Path) -> None:
    """The third page has only one new sentence, which is too few for a document."""
    target, (count,) = write_corpus([toy], tmp_path, tmp_path / "data/toy")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    file = TextFile(path="toy/documents.txt.gz", sha256=digest)
    assert read_documents(tmp_path / "data", file) == [
        ["The first page is here.", "It is short, as you see."],
        ["The second page is here.", "It ends with this.", "The end of the page is near."],
    ]
    assert (count.documents, count.sentences, count.words) == (2, 5, 27)
    table = (tmp_path / "data/toy/packages.tsv").read_text().splitlines()
    assert table[1].split("\t") == ["toy-doc", "1:2.0-1", "GPL-2+", "2", "5", "27"]


@needs_dpkg
def test_same_packages_give_the_same_bytes(toy: Package, tmp_path: Path) -> None:
    first, again = (write_corpus([toy], tmp_path, tmp_path / name)[0].read_bytes() for name in ("first", "again"))
    assert first == again


@needs_dpkg
def test_package_with_other_contents_is_refused(toy: Package, tmp_path: Path) -> None:
    other = toy.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(CorpusError, match=r"toy-doc_1%3a2\.0-1_all\.deb has sha256 .*, the list names 000000000000"):
        write_corpus([other], tmp_path, tmp_path / "data")
    empty = toy.model_copy(update={"files": ("*.pdf",)})
    with pytest.raises(CorpusError, match=r"has no file that matches \*\.pdf"):
        write_corpus([empty], tmp_path, tmp_path / "data")
    unreadable = toy.model_copy(update={"reader": "r_strings"})
    with pytest.raises(CorpusError, match=r"usr/share/doc/toy/a\.html\.gz cannot be read as r_strings"):
        write_corpus([unreadable], tmp_path, tmp_path / "data")
    assert not list((tmp_path / "data").glob("documents*"))


def test_command_names_the_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get there
    assert main(["corpus", "debian-docs", "--output", str(tmp_path)]) == 2
    assert "antiphon corpus: apt-get is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        (
            "Dienst {m} (im Staat) [adm.] | Dienste {pl} | dienen [hist.] :: service (state) | services | serve",
            [("service", "Dienst"), ("services", "Dienste"), ("serve", "dienen")],
        ),
        ("erschöpft; geschafft {adj} :: fagged; jiggered [Br.]", [("fagged", "erschöpft"), ("jiggered", "geschafft")]),
        ("Absperrung {f} :: barrier; cutoff", [("barrier", "Absperrung"), ("cutoff", "Absperrung")]),
        ("Ich liebe dich! :: Love you! /LY/", [("Love you!", "Ich liebe dich!")]),
        (
            "jdn. ganz/völlig in etw. einweihen :: to tell sb. all about sth.",
            [("to tell somebody all about something", "jemanden ganz in etwas einweihen")],
        ),
        ("jdn. / etw. sehen :: to see sb. / sth.", []),
        ("man munkelte, dass … :: it was put about that …", []),
        ("eins | zwei :: one", []),
        ("# Version :: 1.9", []),
        ("ohne Übersetzung", []),
        ("(nur eine Anmerkung) :: note", []),
    ],
)
def test_pairs_of_a_line(line: str, pairs: list[tuple[str, str]]) -> None:
    assert ding_pairs([line, line]) == pairs


def test_sentences_have_four_words_on_each_side() -> None:
    assert is_sentence(("My car won’t start.", "Mein Auto springt nicht an"))
    assert not is_sentence(("five-masted ships that sail", "Fünfmastschiffe"))


@needs_dpkg
def test_sentences_and_words_are_two_files_of_english_and_german(tmp_path: Path) -> None:
    (name,) = DING_PACKAGE.files
    dictionary = "# Version :: 1.9\nAuto {n} | Mein Auto springt nicht an. :: car | My car won’t start.\n"
    described = {**build_package(tmp_path, {name: dictionary.encode()}), "files": [name]}
    written = write_pairs(tmp_path, tmp_path / "data", DebianPackage.model_validate(described))
    assert {path.name: gzip.decompress(path.read_bytes()).decode() for path in written} == {
        "sentences.en-de.tsv.gz": "My car won’t start.\tMein Auto springt nicht an.\n",
        "words.en-de.tsv.gz": "car\tAuto\n",
    }


NOVELS = {
    "EMMA": ["EMMA", "", "", "CHAPTER I", "", "Emma Woodhouse, handsome,", "clever, and rich", " ", "Née—"],
    "Northanger Abbey": ["Northanger Abbey", "", "by", "Jane Austen"],
}
TEXTS = {
    "emma.txt": "EMMA\n\nCHAPTER I\n\nEmma Woodhouse, handsome, clever, and rich\n\nNée—\n",
    "northanger-abbey.txt": "Northanger Abbey\n\nby Jane Austen\n",
}


@needs_dpkg
def test_novels_are_written_with_a_paragraph_a_line(tmp_path: Path) -> None:
    database = b"".join(map(r_strings, NOVELS.values()))
    (name,) = NOVELS_PACKAGE.files
    package = DebianPackage.model_validate({**build_package(tmp_path, {name: database}), "files": [name]})
    written = write_novels(tmp_path, tmp_path / "data", package)
    assert {path.name: path.read_bytes().decode() for path in written} == TEXTS


def test_recipe_names_the_files_of_all_novels() -> None:
    recipe = load_any_recipe("austen-gpt")
    assert isinstance(recipe, LanguageModelRecipe)
    assert len({file.path for file in recipe.data.text}) == 6
    assert all(file.path.startswith("jane-austen/") for file in recipe.data.text)


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
