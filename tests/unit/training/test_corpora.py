"""The corpus of Debian's documentation: reading of formats, choice of prose, and packages that this test builds."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cli.main import main
from antiphon.errors import CorpusError
from antiphon.training.corpora import command
from antiphon.training.corpora.documents import Paragraphs, is_prose, prose_of, split_sentences, write_corpus
from antiphon.training.corpora.packages import Package, load_packages
from antiphon.training.corpora.readers import READERS, paragraphs_of
from antiphon.training.corpus import read_documents
from antiphon.training.recipe import TextFile
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


def test_pod_has_no_commands_code_and_formatting() -> None:
    pod = (
        b"=head1 NAME\n\nThe B<first I<inner>> text C<< $a->b >>.\n\n    code\n\nSee L<the manual|perlfunc> E<lt>now.\n"
    )
    assert READERS["pod"](pod) == [["The first inner text $a->b.", "See the manual <now."]]


def test_backticks_make_a_document_of_each_entry() -> None:
    content = b"mission A\n\tdialog `Hello,\n\tyou.`\n\tchoice\n\t\t`Yes.`\nmission B\n\tdialog `Bye.`\n"
    assert READERS["backticks"](content) == [["Hello, you.", "Yes."], ["Bye."]]


def test_json_gives_longer_strings_in_their_order() -> None:
    content = json.dumps([{"id": "x", "text": ["one two three four five six", "short"]}, 3, None]).encode()
    assert READERS["json"](content) == [["one two three four five six"]]


def test_r_strings_are_split_at_chapters_and_empty_lines() -> None:
    lines = ["EMMA", "", "CHAPTER I", "", "Emma was", "handsome.", "", "She was clever.", "Chapter 2", "The end."]
    header = b"X\n" + struct.pack(">III", 3, 0, 0) + struct.pack(">I", 5) + b"UTF-8"
    strings = b"".join(struct.pack(">II", 0x40009, len(line)) + line.encode() for line in lines)
    serialised = header + struct.pack(">II", 16, len(lines)) + strings
    content = struct.pack(">I", len(serialised)) + zlib.compress(serialised)
    book = [["EMMA"], ["Emma was handsome.", "She was clever."], ["The end."]]
    assert READERS["r_strings"](content * 2) == book * 2


def test_dictionary_entries_are_documents() -> None:
    entries = "hack\n\n   1. {Quick} work\n   is done.\n\n   2. It ends.\n\nhacker\n n.\n\n    Someone.\n"
    assert READERS["dict"](gzip.compress(entries.encode())) == [
        ["1. Quick work is done.", "2. It ends."],
        ["n.", "Someone."],
    ]


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
