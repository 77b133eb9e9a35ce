"""Texts of consecutive sentences of one document (Liu et al. 2019, section 4.2, "doc-sentences"). Token ids only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.training.data.token_documents import TokenDocuments


@dataclass(frozen=True, slots=True)
class SentenceRun:
    """Whole consecutive sentences, or the beginning of a sentence that is too long: token indices [start, end)."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def tokens(self, documents: TokenDocuments) -> tuple[Sequence[int]]:
        """Return the token ids as the only part."""
        return (documents.tokens[self.start : self.end],)


def sentence_runs(documents: TokenDocuments, max_tokens: int) -> list[SentenceRun]:
    """Return runs of at most max_tokens tokens, from one pass through every document.

    A run has as many sentences as fit. A longer sentence is a run alone, without its end.
    Raises ValueError for max_tokens below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    starts = documents.sentence_starts
    runs = []
    for index in range(len(documents)):
        sentences = documents.sentences_of(index)
        first = sentences.start
        while first < sentences.stop:
            fitting = bisect_right(starts, starts[first] + max_tokens, first, sentences.stop + 1) - 1
            after = max(fitting, first + 1)
            runs.append(SentenceRun(starts[first], min(starts[after], starts[first] + max_tokens)))
            first = after
    return runs
