"""Exact-match accuracy of a trained model: share of targets that greedy decoding produces without any difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import Pair


class GreedyDecoder(Protocol):
    """Greedy decoding of a batch: `greedy` or `recurrent_greedy`, with a model as first argument of `partial`."""

    def __call__(self, sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the target ids, without end token, of each source with its end token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Number of examples, and of those with the correct output."""

    total: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of correct outputs, from 0 to 1."""
        return self.correct / self.total


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatch:
    """Counts of all examples, and by number of target tokens without end token, ascending."""

    overall: Count
    by_target_len: dict[int, Count]


def exact_match(
    decode: GreedyDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair], *, batch_rows: int = 128
) -> ExactMatch:
    """Decode every source and compare with its target, in batches of similar target length.

    The model's maximum lengths must include the longest source and target with end tokens. Raises ValueError for no
    pairs.
    """
    if not pairs:
        raise ValueError("pairs is empty; exact match needs at least one pair")
    sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch([source for source, _ in pairs])]
    targets = tokenizer.encode_batch([target for _, target in pairs])
    order = sorted(range(len(pairs)), key=lambda index: (len(targets[index]), len(sources[index])))
    results: dict[int, list[bool]] = defaultdict(list)
    for start in range(0, len(order), batch_rows):
        chosen = order[start : start + batch_rows]
        # One token more than the longest target: an output without end token is then longer than its target.
        found = decode([sources[index] for index in chosen], len(targets[chosen[-1]]) + 1)
        for index, ids in zip(chosen, found, strict=True):
            results[len(targets[index])].append(ids == targets[index])
    counts = {length: Count(total=len(right), correct=sum(right)) for length, right in results.items()}
    overall = Count(total=len(pairs), correct=sum(count.correct for count in counts.values()))
    return ExactMatch(overall=overall, by_target_len=counts)
