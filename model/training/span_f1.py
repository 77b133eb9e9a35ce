"""Entity F1 of BIO tags, as the CoNLL tasks count it: a span is right where its ends and its label are. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int, str]
"""First word, end (exclusive), label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanScore:
    """Spans that are in the reference, that were found, and that are both; shares from 0 to 1, 0 of nothing."""

    expected: int
    found: int
    right: int

    @property
    def precision(self) -> float:
        """Of the spans found, those that are right."""
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """Of the spans to find, those that were."""
        return self.right / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.expected + self.found
        return 2 * self.right / total if total else 0.0


def spans(tags: Sequence[str]) -> list[Span]:
    """Spans of one sentence: B- begins one, and so does I- where no span of its label goes on (conlleval's rule)."""
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
    """Compare tags of the same sentences. Raises ValueError where the numbers of sentences or words differ."""
    pairs = [(set(spans(a)), set(spans(b))) for a, b in zip(expected, found, strict=True) if _alike(a, b)]
    return SpanScore(
        expected=sum(len(a) for a, _ in pairs),
        found=sum(len(b) for _, b in pairs),
        right=sum(len(a & b) for a, b in pairs),
    )


def _alike(expected: Sequence[str], found: Sequence[str]) -> bool:
    if len(expected) != len(found):
        raise ValueError(f"{len(found)} tags for {len(expected)} words")
    return True
