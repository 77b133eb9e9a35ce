from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.training.scores import Span, SpanScore, span_score, spans

TAGS = ["O", "B-a", "I-a", "B-b", "I-b", "B-a-b", "I-a-b"]
SENTENCE = st.lists(st.sampled_from(TAGS), max_size=9)


def spans_by_definition(tags: Sequence[str]) -> set[Span]:
    """Return the spans by brute force: every range and label that satisfies the definition."""

    def holds(start: int, end: int, label: str) -> bool:
        begins = tags[start] == f"B-{label}" or (
            tags[start] == f"I-{label}" and (start == 0 or tags[start - 1] not in (f"B-{label}", f"I-{label}"))
        )
        goes_on = all(tag == f"I-{label}" for tag in tags[start + 1 : end])
        ends = end == len(tags) or tags[end] != f"I-{label}"
        return begins and goes_on and ends

    places = combinations(range(len(tags) + 1), 2)
    return {(start, end, label) for start, end in places for label in ("a", "b", "a-b") if holds(start, end, label)}


@given(SENTENCE)
def test_spans_equal_those_of_the_definition(tags: list[str]) -> None:
    found = spans(tags)
    assert set(found) == spans_by_definition(tags)
    assert len(found) == len(set(found))


@given(
    st.lists(
        st.integers(0, 8).flatmap(lambda n: st.tuples(*[st.lists(st.sampled_from(TAGS), min_size=n, max_size=n)] * 2))
    )
)
def test_score_counts_spans_in_both(sentences: list[tuple[list[str], list[str]]]) -> None:
    expected = [spans_by_definition(a) for a, _ in sentences]
    found = [spans_by_definition(b) for _, b in sentences]
    score = span_score([a for a, _ in sentences], [b for _, b in sentences])
    right = sum(span in b for a, b in zip(expected, found, strict=True) for span in a)
    assert (score.expected, score.found, score.right) == (sum(map(len, expected)), sum(map(len, found)), right)
    if right:
        precision, recall = right / sum(map(len, found)), right / sum(map(len, expected))
        assert (score.precision, score.recall) == (precision, recall)
        assert score.f1 == pytest.approx(2 * precision * recall / (precision + recall))
    else:
        assert (score.precision, score.recall, score.f1) == (0, 0, 0)


def test_score_refuses_sentences_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="1 tags for 2 words"):
        span_score([["O", "O"]], [["O"]])
    with pytest.raises(ValueError, match="zip"):
        span_score([["O"]], [])


def test_score_of_nothing_is_zero() -> None:
    assert span_score([["O"]], [["O"]]) == SpanScore(expected=0, found=0, right=0)
