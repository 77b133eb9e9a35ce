"""Spans of tagged tokens: tokens that form a word, and words that form a span."""

from __future__ import annotations

import pytest

from antiphon.rpc.v1.responses import tagged_spans
from antiphon.v1 import inference_pb2 as pb

Tagged = list[tuple[str, str]]
"""Tokens of a text in order, each with its label."""


def spans_of(text: str, tagged: Tagged) -> list[tuple[str, str]]:
    """Return label and text of each span. Tokens are found from left to right."""
    tokens, end = [], 0
    for piece, label in tagged:
        start = text.index(piece, end)
        end = start + len(piece)
        tokens.append(pb.TaggedToken(start=start, end=end, label=label, score=0.5))
    return [(span.label, text[span.start : span.end]) for span in tagged_spans(text, tokens)]


@pytest.mark.parametrize(
    ("text", "tagged", "expected"),
    [
        ("Ada met Bob", [("Ada", "B-PER"), ("met", "O"), ("Bob", "B-PER")], [("PER", "Ada"), ("PER", "Bob")]),
        ("Ada Bob", [("Ada", "B-PER"), ("Bob", "B-PER")], [("PER", "Ada"), ("PER", "Bob")]),
        ("New York", [("New", "B-LOC"), ("York", "I-LOC")], [("LOC", "New York")]),
        ("New York", [("New", "I-LOC"), ("York", "I-PER")], [("LOC", "New"), ("PER", "York")]),
        ("New York", [("New", "LOC"), ("York", "LOC")], [("LOC", "New York")]),
        # The label of a word is that of its first token.
        ("Lovelace", [("Love", "B-PER"), ("lace", "O")], [("PER", "Lovelace")]),
        ("Lovelace", [("Love", "O"), ("lace", "B-PER")], []),
        ("Berlin, too", [("Berlin", "B-LOC"), (",", "O"), ("too", "O")], [("LOC", "Berlin")]),
        # Vocabularies in which the space before a word belongs to it.
        ("in New York", [("in", "O"), (" New", "B-LOC"), (" York", "I-LOC")], [("LOC", "New York")]),
        # Every sign is a word, and so is every character in scripts without spaces; marks belong to their letter.
        ("東京に", [("東", "B-LOC"), ("京", "I-LOC"), ("に", "O")], [("LOC", "東京")]),
        ("cafe\u0301s", [("cafe", "B-LOC"), ("\u0301s", "O")], [("LOC", "cafe\u0301s")]),
    ],
)
def test_spans_are_adjacent_words_of_one_label(text: str, tagged: Tagged, expected: list[tuple[str, str]]) -> None:
    assert spans_of(text, tagged) == expected


def test_tokens_of_one_characters_bytes_are_one_word() -> None:
    tokens = [pb.TaggedToken(start=0, end=1, label=label, score=score) for label, score in (("B-X", 0.9), ("O", 0.1))]
    (span,) = tagged_spans("😀", tokens)
    assert (span.start, span.end, span.label) == (0, 1, "X")
    assert span.score == pytest.approx(0.9)


def test_tokens_without_a_place_in_the_text_are_not_words() -> None:
    tokens = [
        pb.TaggedToken(start=0, end=0, label="B-X", score=1.0),
        pb.TaggedToken(start=0, end=3, label="B-Y", score=1.0),
        pb.TaggedToken(start=3, end=4, label="I-Y", score=1.0),  # a space
    ]
    assert [(span.label, span.start, span.end) for span in tagged_spans("abc ", tokens)] == [("Y", 0, 3)]
