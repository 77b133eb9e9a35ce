"""Choice of a few training examples, to measure what pre-training saves in labelled data. Works on text only."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from antiphon.training.data.text_files import Labelled, Tagged

Example = TypeVar("Example", bound=Labelled | Tagged)


def few_examples(items: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Return at most `count` of the items in their order; seed and text decide which.

    Labels of texts take turns, so that their numbers differ by at most one as long as each label has enough texts.
    Sentences with tags are drawn without regard to their tags. A smaller count gives a part of a larger one.
    """
    order = sorted(range(len(items)), key=lambda index: _draw(items[index].text, seed))
    taken: Counter[str] = Counter()
    turns = []
    for index in order:
        label = _label(items[index])
        turns.append(taken[label])
        taken[label] += 1
    by_turn = [index for _, index in sorted(zip(turns, order, strict=True), key=lambda pair: pair[0])]
    return [items[index] for index in sorted(by_turn[:count])]


def _label(item: Labelled | Tagged) -> str:
    return item.label if isinstance(item, Labelled) else ""


def _draw(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}|{text}".encode()).digest()
