"""Entity F1 of BIO tags as in the CoNLL shared tasks: a span is correct if its ends and its label are. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int, str]
"""First word, end (exclusive), label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanScore:
    """Numbers of expected, found and correct spans. Precision, recall and F1 are from 0 to 1, and 0 without spans."""

    expected: int
    found: int
    right: int

    @property
    def precision(self) -> float:
        """Share of the found spans that are correct."""
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """Share of the expected spans that were found."""
        return self.right / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.expected + self.found
        return 2 * self.right / total if total else 0.0


def spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of one sentence; B- starts a span, and I- too after a tag with another label (conlleval)."""
    found: list[Span] = []
    start, label = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        kind, _, of = tag.partition("-")
        if label and (kind != "I" or of != label):
            found.append((start, position, label))
            label = ""
        if of and not label:
            start, label = position, of
    return found


def span_score(expected: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> SpanScore:
    """Compare tags of the same sentences. Raises ValueError if the numbers of sentences or words differ."""
    for reference, tags in zip(expected, found, strict=True):
        if len(reference) != len(tags):
            raise ValueError(f"{len(tags)} tags for {len(reference)} words")
    pairs = [(set(spans(a)), set(spans(b))) for a, b in zip(expected, found, strict=True)]
    return SpanScore(
        expected=sum(len(a) for a, _ in pairs),
        found=sum(len(b) for _, b in pairs),
        right=sum(len(a & b) for a, b in pairs),
    )
