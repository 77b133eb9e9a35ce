"""Pairs of lines in the format of the dictionary Ding."""

import gzip
from pathlib import Path

import pytest

from antiphon.training.corpora.packages import DebianPackage
from antiphon.training.corpora.pairs import DING_PACKAGE, ding_pairs, is_sentence, write_pairs
from tests.debian_packages import build_package, needs_dpkg


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        (
            "Dienst {m} (im Staat) [adm.] | Dienste {pl} | dienen [hist.] :: service (state) | services | serve",
            [
                ("service", "Dienst"),
                ("services", "Dienste"),
                ("serve", "dienen"),
            ],
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
