"""Stages of sampling: invariants of their distributions, and agreement with the tokens that are sampled from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.ops.logits_warpers import Stage, StageDistribution, Warp, likeliest_ids, sample_token, sampling_stages

VOCAB = 40
WARPS = st.builds(
    Warp,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    typical_p=st.sampled_from([1.0, 0.8, 0.2]),
)
ALL_WARPERS = Warp(temperature=1.4, top_k=20, top_p=0.95, min_p=0.02, typical_p=0.9)


def logprobs_of(seed: int) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(0.0, 2.0, VOCAB)
    return np.asarray(logits - np.log(np.exp(logits).sum()), np.float32)


def edited(logprobs: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Return scores in which some tokens are forbidden and others changed."""
    dice = np.random.default_rng(seed)
    scores = logprobs.copy()
    scores[dice.choice(VOCAB, 5, replace=False)] += np.float32(1.5)
    scores[dice.choice(VOCAB, 10, replace=False)] = -np.inf
    return scores


def by_stage(*arguments: Any, **options: Any) -> dict[Stage, StageDistribution]:
    return {found.stage: found for found in sampling_stages(*arguments, **options)}


@given(seed=st.integers(0, 10**6), warp=WARPS, is_edited=st.booleans())
def test_every_stage_is_a_distribution_over_tokens_that_the_stage_before_kept(
    seed: int, warp: Warp, is_edited: bool
) -> None:
    logprobs = logprobs_of(seed)
    stages = sampling_stages(logprobs, edited(logprobs, seed) if is_edited else logprobs, warp)
    assert [found.stage for found in stages] == list(Stage)
    kept = np.ones(VOCAB, np.bool_)
    for found in stages:
        probabilities = np.exp(found.logprobs)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)
        assert not ((probabilities > 0) & ~kept).any()
        kept = probabilities > 0
        assert found.num_kept == kept.sum()
        entropy = -(probabilities[kept] * np.log(probabilities[kept])).sum()
        assert found.entropy == pytest.approx(entropy, abs=1e-9)
        assert 0 <= found.entropy <= np.log(found.num_kept) + 1e-9


@given(seed=st.integers(0, 10**6))
def test_a_stage_without_effect_repeats_the_one_before(seed: int) -> None:
    logprobs = logprobs_of(seed)
    for found in sampling_stages(logprobs, logprobs.copy(), Warp(temperature=1.0)):
        np.testing.assert_array_equal(found.logprobs, logprobs.astype(np.float64))
    warped = by_stage(logprobs, edited(logprobs, seed), Warp(temperature=0.7, top_p=0.8))
    for stage, before in ((Stage.TOP_K, Stage.TEMPERATURE), (Stage.MIN_P, Stage.TOP_P), (Stage.TYPICAL_P, Stage.MIN_P)):
        np.testing.assert_array_equal(warped[stage].logprobs, warped[before].logprobs)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), warp=WARPS.filter(lambda warp: warp.temperature > 0))
def test_last_stage_has_the_frequencies_of_the_sampled_tokens(seed: int, warp: Warp) -> None:
    logprobs = logprobs_of(seed)
    scores = edited(logprobs, seed)
    num_draws = 2000
    uniforms = (np.arange(num_draws) + 0.5) / num_draws
    drawn = np.bincount([sample_token(scores, warp, uniform) for uniform in uniforms], minlength=VOCAB)
    last = sampling_stages(logprobs, scores, warp)[-1]
    # Evenly spaced numbers hit the interval of a token as often as its length says, give or take one.
    assert np.abs(drawn - num_draws * np.exp(last.logprobs)).max() <= 1.001
    assert not drawn[last.logprobs == -np.inf].any()


def test_temperature_0_leaves_the_likeliest_token_alone() -> None:
    logprobs = logprobs_of(1)
    scores = logprobs.copy()
    scores[[3, 9]] = 5.0  # equal: the lower id wins
    stages = by_stage(logprobs, scores, Warp(temperature=0.0, top_k=5, top_p=0.5))
    assert stages[Stage.LOGITS_PROCESSORS].num_kept == VOCAB
    for stage in list(Stage)[2:]:
        assert (stages[stage].num_kept, stages[stage].entropy, stages[stage].logprobs[3]) == (1, 0.0, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_forced_token_is_left_alone_even_if_it_is_forbidden(temperature: float) -> None:
    logprobs = logprobs_of(2)
    scores = logprobs.copy()
    scores[7] = -np.inf
    stages = by_stage(logprobs, scores, Warp(temperature=temperature, top_k=3), forced_id=7)
    np.testing.assert_array_equal(stages[Stage.MODEL].logprobs, logprobs.astype(np.float64))
    for stage in list(Stage)[1:]:
        assert (stages[stage].num_kept, stages[stage].logprobs[7]) == (1, 0.0)


@pytest.mark.parametrize("warp", [Warp(temperature=0.0), ALL_WARPERS])
def test_no_token_is_kept_when_the_processors_forbid_all(warp: Warp) -> None:
    stages = by_stage(logprobs_of(3), np.full(VOCAB, -np.inf, np.float32), warp)
    assert stages.pop(Stage.MODEL).num_kept == VOCAB
    assert {(found.num_kept, found.entropy) for found in stages.values()} == {(0, 0.0)}


def test_likeliest_ids_are_in_order_and_never_forbidden() -> None:
    values = np.array([0.5, -np.inf, 2.0, 0.5, -1.0], np.float32)
    assert likeliest_ids(values, 3).tolist() == [2, 0, 3]
    assert likeliest_ids(values, 10).tolist() == [2, 0, 3, 4]
