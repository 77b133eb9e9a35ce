"""Names of head patterns, for weights that are made after each of them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.play.attention import Pattern, pattern_of

pytestmark = pytest.mark.pages

KEYS = ["<s>", "the", "cat", "sat", "on", "the", "mat", "</s>"]
SIZE = len(KEYS)


def attending(places: NDArray[np.int64], num_keys: int = SIZE) -> NDArray[np.float32]:
    """Return weights of queries that attend to one place each with 0.6, and to the others with what is left."""
    weights = np.full((len(places), num_keys), 0.4 / (num_keys - 1))
    weights[np.arange(len(places)), places] = 0.6
    return weights.astype(np.float32)


@pytest.mark.parametrize(
    ("places", "pattern"),
    [
        (np.arange(SIZE), "diagonal"),
        (np.maximum(np.arange(SIZE) - 1, 0), "previous"),
        (np.minimum(np.arange(SIZE) + 1, SIZE - 1), "next"),
        (np.zeros(SIZE, np.int64), "first"),
        (np.full(SIZE, SIZE - 1), "separator"),
        (np.array([5, 3, 1, 5, 2, 1, 4, 3]), "mixed"),
    ],
)
def test_head_has_the_name_of_the_place_that_it_attends_to(places: NDArray[np.int64], pattern: Pattern) -> None:
    assert pattern_of(attending(places), KEYS) == pattern


def test_head_with_equal_weights_is_uniform() -> None:
    assert pattern_of(np.full((SIZE, SIZE), 1 / SIZE, np.float32), KEYS) == "uniform"


def test_causal_head_with_equal_weights_over_what_it_sees_is_uniform() -> None:
    seen = np.tril(np.ones((SIZE, SIZE)))
    assert pattern_of((seen / seen.sum(axis=1, keepdims=True)).astype(np.float32), KEYS) == "uniform"


def test_alignment_of_a_longer_target_is_diagonal() -> None:
    places = np.round(np.arange(12) * (SIZE - 1) / 11).astype(np.int64)
    assert pattern_of(attending(places), KEYS) == "diagonal"


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_head_of_one_query_or_one_key_has_no_pattern(shape: tuple[int, int]) -> None:
    assert pattern_of(np.full(shape, 1 / shape[1], np.float32), ["a"] * shape[1]) == "mixed"
