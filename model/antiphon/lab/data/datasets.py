"""Data of one experiment: files for a recipe, and the test parts as pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.training.corpus import Pair
from antiphon.training.recipe import DataConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Data of one task.

    data: files for a recipe.
    vocab_size: vocabulary for a recipe, large enough for one token for each word of the task.
    tests: pairs of each test part, by name; the first one is the recipe's test part.
    """

    data: DataConfig
    vocab_size: int
    tests: Mapping[str, Sequence[Pair]]
