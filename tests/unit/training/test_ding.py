"""Pairs of lines in the format of the dictionary Ding."""

import pytest

from antiphon.model.training.corpora.ding import ding_pairs, is_sentence


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
