"""Distributions after our logits warpers compared with transformers' warpers, and the random numbers of sampling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.controls.table import MAX_SEED
from antiphon.ops.logits_warpers import Warp, distribution, ids_of_largest, invert
from antiphon.ops.sampling import seed_of_output, uniform_at
from tests.unit.sampling.sampling_reference import Logits, logits_of, reference_probabilities


def probabilities(logits: Logits, warp: Warp) -> NDArray[np.float64]:
    ids, weights = distribution(logits, warp)
    result = np.zeros(len(logits))
    result[slice(None) if ids is None else ids] = weights / weights.sum()
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 300, 999, 1000, 5000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999, 1.0])
def test_distribution_equals_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    warp = Warp(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = logits_of(1, 1000, seed=top_k)[0]
    ours, theirs = probabilities(logits, warp), reference_probabilities(logits, warp)
    assert np.array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    vocab_size=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.01, 1.0),
)
def test_logits_warpers_are_applied_in_the_order_of_transformers(
    vocab_size: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    logits = logits_of(1, vocab_size, seed=seed)[0]
    full = Warp(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    for warp in (full, dataclasses.replace(full, top_p=1.0), dataclasses.replace(full, top_k=0, min_p=0.0)):
        np.testing.assert_allclose(probabilities(logits, warp), reference_probabilities(logits, warp), atol=1e-6)


def test_distribution_keeps_the_lowest_ids_among_equals() -> None:
    logits = np.array([0.0, 5.0, 5.0, 1.0, 5.0], np.float32)
    ids, _ = distribution(logits, Warp(temperature=1.0, top_k=2))
    assert ids is not None
    assert ids.tolist() == [1, 2]
    ids, _ = distribution(np.zeros(8, np.float32), Warp(temperature=1.0, top_p=0.5))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2, 3]


def test_uniforms_are_uniform_over_seeds_positions_and_outputs() -> None:
    seeds = np.array([uniform_at(seed, 3) for seed in range(4000)])
    positions = np.array([uniform_at(3, position) for position in range(4000)])
    outputs = np.array([uniform_at(seed_of_output(3, index), 3) for index in range(4000)])
    for values in (seeds, positions, outputs):
        assert values.min() >= 0.0
        assert values.max() < 1.0
        ranks = np.sort(values)
        distance = np.abs(ranks - np.arange(4000) / 4000).max()
        assert distance < 2.2 / np.sqrt(4000)  # Kolmogorov-Smirnov, with a far larger bound than that of 1 in 1000
    assert uniform_at(0, 0) != uniform_at(1, 0) != uniform_at(MAX_SEED, 2**31)


def test_seeds_of_outputs_are_those_of_splitmix64() -> None:
    """The expected numbers are those of Vigna's reference implementation of SplitMix64 for this seed."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [seed_of_output(1234567, index) for index in range(5)] == [1234567, *published]
    seeds = {seed_of_output(seed, index) for seed in (0, 1, MAX_SEED) for index in range(100)}
    assert len(seeds) == 300
    assert max(seeds) <= MAX_SEED


@given(count=st.integers(1, 12), values=st.lists(st.integers(-3, 3), min_size=1, max_size=10))
def test_ids_of_largest_prefer_the_lowest_among_equals(count: int, values: list[int]) -> None:
    array = np.array(values, np.float32)
    expected = np.argsort(-array, kind="stable")[:count]
    assert ids_of_largest(array, count).tolist() == sorted(expected.tolist())


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 0.25, 1.0, 1e9]), min_size=1, max_size=400).filter(any),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_invert_picks_a_weight_that_covers_the_point(weights: list[float], uniform: float) -> None:
    array = np.array(weights)
    index = invert(array, uniform)
    assert array[index] > 0
    point, total = uniform * array.sum(), array.sum()
    assert array[:index].sum() <= point + 1e-9 * total
    assert array[: index + 1].sum() >= point - 1e-9 * total
