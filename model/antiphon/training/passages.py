"""Documents as token ids, and the passages of them that an encoder reads: next-sentence pairs, or runs of sentences.

Half of the pairs have a second part from another document (Devlin et al. 2019, appendix A.2). Two choices differ from
BERT's tools, so that neither the length nor the kind of document tells which pairs are random: the random part is as
long as the real continuation would be, and it begins at a random sentence of all other documents, not at one of a
random document. Runs are the "doc-sentences" of Liu et al. 2019, section 4.2.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class TokenDocuments:
    """Token ids of all sentences of all documents, in their order.

    tokens: int32 ids. sentence_starts, document_starts: index of the first token of each sentence, and of the first
    sentence of each document; both end with one more entry, the total number.
    """

    def __init__(self, documents: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self.tokens = array("i")
        self.sentence_starts = array("q", [0])
        self.document_starts = array("q", [0])
        for document in documents:
            self.append(document)

    def __len__(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """Number of sentences of all documents."""
        return len(self.sentence_starts) - 1

    def append(self, document: Iterable[Sequence[int]]) -> None:
        """Add a document; sentences without tokens are left out, and so is a document without sentences."""
        for sentence in document:
            if sentence:
                self.tokens.extend(sentence)
                self.sentence_starts.append(len(self.tokens))
        if self.num_sentences > self.document_starts[-1]:
            self.document_starts.append(self.num_sentences)

    def sentences_of(self, document: int) -> range:
        """Return the indices of a document's sentences."""
        return range(self.document_starts[document], self.document_starts[document + 1])

    def document_of(self, sentence: int) -> int:
        """Return the document of a sentence."""
        return bisect_right(self.document_starts, sentence) - 1


SHORT_SHARE = 0.1  # share of shorter pairs, because texts of later tasks are short (appendix A.2)


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive sentences, or two parts of them, whole unless truncated: token indices [start, end) of each part.

    is_next: True if the second part follows the first in its document; None without a second part.
    """

    first_start: int
    first_end: int
    second_start: int = 0
    second_end: int = 0
    is_next: bool | None = None

    def __len__(self) -> int:
        return self.first_end - self.first_start + self.second_end - self.second_start

    def parts(self, documents: TokenDocuments) -> list[Sequence[int]]:
        """Return the token ids of one part or of both."""
        first = documents.tokens[self.first_start : self.first_end]
        return [first] if self.is_next is None else [first, documents.tokens[self.second_start : self.second_end]]


def sentence_pairs(documents: TokenDocuments, max_tokens: int, seed: int) -> list[Passage]:
    """Return pairs of at most max_tokens tokens, from one pass through every document.

    Sentences of a document are collected until they have max_tokens tokens, or fewer for one pair in ten. A random
    number of them is the first part. In half of the pairs the remaining sentences are the second part. In the other
    half the second part comes from another document, and the remaining sentences are used for the next pair.
    Raises ValueError for fewer than two documents or max_tokens below 2.
    """
    if len(documents) < 2 or max_tokens < 2:
        raise ValueError(f"{len(documents)} documents and max_tokens={max_tokens}; both must be at least 2 for pairs")
    chance = random.Random(seed)
    starts = documents.sentence_starts
    pairs = []
    for index in range(len(documents)):
        sentences = documents.sentences_of(index)
        start = sentences.start
        while start < sentences.stop - 1:
            target = chance.randint(2, max_tokens) if chance.random() < SHORT_SHARE else max_tokens
            end = _end(documents, start, target, at_least=2, stop=sentences.stop)
            split = chance.randint(start + 1, end - 1)
            is_next = chance.random() < 0.5
            first, second = (starts[start], starts[split]), (starts[split], starts[end])
            if not is_next:
                second = _unrelated(documents, sentences, second[1] - second[0], chance)
            pairs.append(Passage(*_truncated(first, second, max_tokens, chance), is_next))
            start = end if is_next else split
    return pairs


def _end(documents: TokenDocuments, start: int, num_tokens: int, *, at_least: int, stop: int) -> int:
    """Return the end of the sentences from start on that have num_tokens tokens, or of the document."""
    starts = documents.sentence_starts
    reached = bisect_left(starts, starts[start] + num_tokens, start + at_least, stop)
    return min(reached, stop)


def _unrelated(documents: TokenDocuments, sentences: range, num_tokens: int, chance: random.Random) -> tuple[int, int]:
    """Return the tokens [start, end) of sentences of another document from a random sentence on.

    They end at the end of the sentence that is nearest to num_tokens tokens: ending at the next one would make random
    parts longer than real ones.
    """
    starts = documents.sentence_starts
    drawn = chance.randrange(documents.num_sentences - len(sentences))
    start = drawn if drawn < sentences.start else drawn + len(sentences)
    stop = documents.sentences_of(documents.document_of(start)).stop
    end = _end(documents, start, num_tokens, at_least=1, stop=stop)
    target = starts[start] + num_tokens
    if end - start > 1 and target - starts[end - 1] < starts[end] - target:
        end -= 1
    return starts[start], starts[end]


def _truncated(
    first: tuple[int, int], second: tuple[int, int], max_tokens: int, chance: random.Random
) -> tuple[int, int, int, int]:
    """Return both parts; tokens are removed from a random end of the longer part until both fit."""
    spans = [list(first), list(second)]
    lens = [first[1] - first[0], second[1] - second[0]]
    while sum(lens) > max_tokens:
        longer = 0 if lens[0] >= lens[1] else 1
        lens[longer] -= 1
        if chance.random() < 0.5:
            spans[longer][0] += 1
        else:
            spans[longer][1] -= 1
    return spans[0][0], spans[0][1], spans[1][0], spans[1][1]


def sentence_runs(documents: TokenDocuments, max_tokens: int) -> list[Passage]:
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
            runs.append(Passage(starts[first], min(starts[after], starts[first] + max_tokens)))
            first = after
    return runs
