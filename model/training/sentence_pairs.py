"""Next-sentence pairs from documents, half of them with a second part from elsewhere (Devlin et al. 2019, A.2).

Knows token ids and chance; nothing of files, templates or tensors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Document = Sequence[Sequence[int]]
"""Sentences of one document, as token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePair:
    """Two parts, each one or more whole sentences unless cut to fit."""

    first: list[int]
    second: list[int]
    is_next: bool


def sentence_pairs(documents: Sequence[Document], max_tokens: int, seed: int) -> list[SentencePair]:
    """Pairs of at most max_tokens tokens together, once through every document.

    Sentences of a document are gathered until max_tokens are reached; a random number of them is the first part.
    The second is the rest in half of the pairs, else the beginning of what follows a random sentence of another
    document, and the rest is used again. Raises ValueError unless there are two documents and max_tokens is above 1.
    """
    if len(documents) < 2 or max_tokens < 2:
        raise ValueError(f"{len(documents)} documents and max_tokens={max_tokens}: pairs need two of each")
    chance = random.Random(seed)
    pairs = []
    for index, document in enumerate(documents):
        start = 0
        while start < len(document) - 1:
            gathered = _gather(document, start, max_tokens)
            split = start + chance.randint(1, gathered - 1)
            is_next = chance.random() < 0.5
            rest = document[split : start + gathered] if is_next else _elsewhere(documents, index, max_tokens, chance)
            first, second = _fitted(document[start:split], rest, max_tokens, chance)
            pairs.append(SentencePair(first=first, second=second, is_next=is_next))
            start = start + gathered if is_next else split
    return pairs


def _gather(document: Document, start: int, max_tokens: int) -> int:
    """How many sentences from start on reach max_tokens: at least two, or all there are."""
    total = 0
    for count, sentence in enumerate(document[start:], start=1):
        total += len(sentence)
        if total >= max_tokens and count >= 2:
            return count
    return len(document) - start


def _elsewhere(documents: Sequence[Document], index: int, max_tokens: int, chance: random.Random) -> Document:
    """Sentences of another document from a random one on."""
    other = chance.randrange(len(documents) - 1)
    document = documents[other if other < index else other + 1]
    start = chance.randrange(len(document))
    return document[start : start + max(1, _gather(document, start, max_tokens))]


def _fitted(first: Document, second: Document, max_tokens: int, chance: random.Random) -> list[list[int]]:
    """Both parts as one list of tokens each; tokens are cut off the longer one, at either end, until both fit."""
    parts = [[token for sentence in part for token in sentence] for part in (first, second)]
    while len(parts[0]) + len(parts[1]) > max_tokens:
        longer = max(parts, key=len)
        del longer[0 if chance.random() < 0.5 else -1]
    return parts
