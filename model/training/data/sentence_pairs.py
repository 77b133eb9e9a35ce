"""Next-sentence pairs from documents; half of them have a second part from another document.

Devlin et al. 2019, appendix A.2. Works on token ids only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Document = Sequence[Sequence[int]]
"""Sentences of one document, as token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePair:
    """Two parts, each one or more whole sentences unless truncated to max_tokens."""

    first: list[int]
    second: list[int]
    is_next: bool


def sentence_pairs(documents: Sequence[Document], max_tokens: int, seed: int) -> list[SentencePair]:
    """Return pairs of at most max_tokens tokens, from one pass through every document.

    Sentences of a document are collected until they have max_tokens tokens. A random number of them is the first part.
    In half of the pairs the remaining sentences are the second part. In the other half the second part starts at a
    random sentence of another document, and the remaining sentences are used for the next pair.
    Raises ValueError for fewer than two documents or max_tokens below 2.
    """
    if len(documents) < 2 or max_tokens < 2:
        raise ValueError(f"{len(documents)} documents and max_tokens={max_tokens}; both must be at least 2 for pairs")
    chance = random.Random(seed)
    pairs = []
    for index, document in enumerate(documents):
        start = 0
        while start < len(document) - 1:
            count = _num_sentences(document, start, max_tokens)
            split = start + chance.randint(1, count - 1)
            is_next = chance.random() < 0.5
            rest = document[split : start + count] if is_next else _unrelated(documents, index, max_tokens, chance)
            first, second = _truncated(document[start:split], rest, max_tokens, chance)
            pairs.append(SentencePair(first=first, second=second, is_next=is_next))
            start = start + count if is_next else split
    return pairs


def _num_sentences(document: Document, start: int, max_tokens: int) -> int:
    """Return the number of sentences from start on that have max_tokens tokens: at least two, or all remaining."""
    total = 0
    for count, sentence in enumerate(document[start:], start=1):
        total += len(sentence)
        if total >= max_tokens and count >= 2:
            return count
    return len(document) - start


def _unrelated(documents: Sequence[Document], index: int, max_tokens: int, chance: random.Random) -> Document:
    """Return sentences of another random document, from a random sentence on."""
    other = chance.randrange(len(documents) - 1)
    document = documents[other if other < index else other + 1]
    start = chance.randrange(len(document))
    return document[start : start + max(1, _num_sentences(document, start, max_tokens))]


def _truncated(first: Document, second: Document, max_tokens: int, chance: random.Random) -> list[list[int]]:
    """Return the tokens of both parts; tokens are removed from a random end of the longer part until both fit."""
    parts = [[token for sentence in part for token in sentence] for part in (first, second)]
    while len(parts[0]) + len(parts[1]) > max_tokens:
        longer = max(parts, key=len)
        del longer[0 if chance.random() < 0.5 else -1]
    return parts
