"""Training pairs of one epoch: collections repeated as the recipe says, and changed by its augmentation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.training.data.corpus import Pair
from antiphon.training.recipe import Augmentation


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedPairs:
    """Training pairs of one collection, with `repeat` and `in_order` of Collection."""

    pairs: Sequence[Pair]
    repeat: float = 1.0
    in_order: bool = False


def epoch_pairs(parts: Sequence[RepeatedPairs], augmentation: Augmentation, seed: int) -> list[Pair]:
    """Return the pairs of one epoch; they depend only on the arguments. `split_tokens` concerns tokens, not texts."""
    chance = random.Random(seed)
    return [
        _without_details(pair, augmentation, chance)
        for part in parts
        for pair in _joined(_drawn(part, chance), part, augmentation.joined, chance)
    ]


def _drawn(part: RepeatedPairs, chance: random.Random) -> list[int]:
    """Return indices: each as often as the whole part of `repeat`, and some of them once more for the fraction."""
    whole, fraction = divmod(part.repeat, 1)
    count = len(part.pairs)
    return [*range(count)] * int(whole) + sorted(chance.sample(range(count), round(fraction * count)))


def _joined(indices: Sequence[int], part: RepeatedPairs, share: float, chance: random.Random) -> list[Pair]:
    """Return the pairs of the indices; a share of them is followed by the next pair, or by any pair, in one text."""
    pairs = part.pairs
    found: list[Pair] = []
    for index in indices:
        source, target = pairs[index]
        if chance.random() < share:
            other = index + 1 if part.in_order else chance.randrange(len(pairs))
            if other < len(pairs):
                source, target = f"{source} {pairs[other][0]}", f"{target} {pairs[other][1]}"
        found.append((source, target))
    return found


def _without_details(pair: Pair, augmentation: Augmentation, chance: random.Random) -> Pair:
    source, target = pair
    if chance.random() < augmentation.no_full_stop and source.endswith(".") and target.endswith("."):
        source, target = source[:-1], target[:-1]
    if chance.random() < augmentation.lower_case:
        source = source.lower()
    return source, target
