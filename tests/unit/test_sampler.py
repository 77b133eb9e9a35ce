"""The sampler against transformers' logits processors, against its own distribution, and against its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.model.ops.counter_random import uniform_at
from antiphon.service.request import MAX_SEED, SamplingParams
from antiphon.service.runner import Draw
from antiphon.service.sampler import Warp, distribution, invert, sample
from tests.batches import batch_of

GREEDY = SamplingParams()


def logits_of(rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return (scale * generator.standard_normal((rows, vocab_size))).astype(np.float32)


def draw(
    logits: NDArray[np.float32], params: list[SamplingParams], positions: list[int], *, num_logprobs: int = -1
) -> Draw:
    """Sample rows that feed one token each."""
    rows = len(params)
    batch = batch_of([[0]] * rows, positions, [1] * rows, params=params, num_logprobs=num_logprobs)
    return sample(logits, batch)


def probabilities(logits: NDArray[np.float32], warp: Warp) -> NDArray[np.float64]:
    ids, weights = distribution(logits, warp)
    result = np.zeros(len(logits))
    result[slice(None) if ids is None else ids] = weights / weights.sum()
    return result


def reference_probabilities(logits: NDArray[np.float32], params: Warp) -> NDArray[np.float64]:
    """What transformers draws from, in float64."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    chain = [warpers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        chain.append(warpers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(warpers.TopPLogitsWarper(params.top_p))
    for warper in chain:
        scores = warper(None, scores)
    kept: NDArray[np.float64] = torch.softmax(scores, dim=-1)[0].numpy()
    return kept


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 300, 999, 1000, 5000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.999, 1.0])
def test_sampler_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    params = Warp(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = logits_of(1, 1000, seed=top_k)[0]
    ours, theirs = probabilities(logits, params), reference_probabilities(logits, params)
    assert np.array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


def test_sampler_draws_follow_the_distribution() -> None:
    params = [SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=seed) for seed in range(2000)]
    logits = np.repeat(logits_of(1, 300, scale=1.0), len(params), axis=0)
    expected = probabilities(logits[0], Warp(temperature=1.3, top_k=40, top_p=0.95))
    kept = np.flatnonzero(expected)
    observed = np.zeros(300)
    for position in range(5):
        ids = draw(logits, params, [position] * len(params)).token_ids
        observed += np.bincount(ids, minlength=300)
    assert observed[expected == 0].sum() == 0
    total = observed.sum()
    chi_square = (((observed - total * expected) ** 2)[kept] / (total * expected[kept])).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom)  # 4.5 deviations of a chi-square


def test_sampler_uniforms_are_uniform_over_seeds_and_positions() -> None:
    seeds = np.array([uniform_at(seed, 3) for seed in range(4000)])
    positions = np.array([uniform_at(3, position) for position in range(4000)])
    for values in (seeds, positions):
        assert values.min() >= 0.0
        assert values.max() < 1.0
        ranks = np.sort(values)
        distance = np.abs(ranks - np.arange(4000) / 4000).max()
        assert distance < 2.2 / np.sqrt(4000)  # Kolmogorov-Smirnov, far beyond the 1 in 1000 bound
    assert uniform_at(0, 0) != uniform_at(1, 0) != uniform_at(MAX_SEED, 2**31)


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(2, 9), vocab_size=st.sampled_from([5, 63, 257, 1031]))
def test_sampler_row_is_the_same_alone_and_among_others(data: st.DataObject, rows: int, vocab_size: int) -> None:
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            top_k=data.draw(st.sampled_from([0, 1, 4, 100])),
            top_p=data.draw(st.sampled_from([0.3, 0.9, 1.0])),
            seed=data.draw(st.integers(0, MAX_SEED)),
        )
        for _ in range(rows)
    ]
    positions = data.draw(st.lists(st.integers(0, 500), min_size=rows, max_size=rows))
    logits = logits_of(rows, vocab_size, seed=data.draw(st.integers(0, 99)))
    together = draw(logits, params, positions).token_ids
    order = data.draw(st.permutations(range(rows)))
    moved = draw(logits[order].copy(), [params[i] for i in order], [positions[i] for i in order]).token_ids
    assert moved.tolist() == [together[i] for i in order]
    for row in range(rows):
        alone = draw(logits[row : row + 1].copy(), [params[row]], [positions[row]]).token_ids
        assert alone[0] == together[row]


def test_sampler_repeats_itself_for_a_seed_and_differs_between_positions() -> None:
    logits = logits_of(1, 500, scale=0.5)
    params = [SamplingParams(temperature=1.0, seed=12)]
    once = [int(draw(logits, params, [position]).token_ids[0]) for position in range(30)]
    again = [int(draw(logits, params, [position]).token_ids[0]) for position in range(30)]
    assert once == again
    assert len(set(once)) > 15


def test_sampler_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([[0.0, 5.0, 5.0, 1.0, 5.0]], np.float32)
    assert draw(logits, [GREEDY], [0]).token_ids[0] == 1
    only = SamplingParams(temperature=1.0, top_k=1)
    assert draw(logits, [only], [0]).token_ids[0] == 1
    ids, _ = distribution(logits[0], Warp(temperature=1.0, top_k=2))
    assert ids is not None
    assert ids.tolist() == [1, 2]
    ids, _ = distribution(np.zeros(8, np.float32), Warp(temperature=1.0, top_p=0.5))
    assert ids is not None
    assert ids.tolist() == [0, 1, 2, 3]


def test_sampler_is_greedy_in_the_limits_of_its_parameters() -> None:
    logits = logits_of(6, 400)
    greedy = draw(logits, [GREEDY] * 6, [0] * 6).token_ids
    for params in (
        SamplingParams(temperature=1e-30, seed=5),
        SamplingParams(temperature=2.0, top_k=1, seed=5),
        SamplingParams(temperature=2.0, top_p=1e-9, seed=5),
    ):
        assert draw(logits, [params] * 6, [3] * 6).token_ids.tolist() == greedy.tolist()


def test_sampler_never_draws_a_forbidden_token() -> None:
    logits = np.full((1, 600), -np.inf, np.float32)
    logits[0, [5, 300, 599]] = 0.0
    for top_k, top_p in ((0, 1.0), (10, 1.0), (0, 0.99), (10, 0.99)):
        params = [SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)]
        drawn = {int(draw(logits, params, [position]).token_ids[0]) for position in range(60)}
        assert drawn == {5, 300, 599}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sampler_marks_only_the_row_whose_logits_are_not_finite(bad: float) -> None:
    logits = logits_of(3, 50)
    logits[1, 7] = bad
    sampled = SamplingParams(temperature=1.0)
    for params in (GREEDY, sampled):
        assert (draw(logits, [params] * 3, [0] * 3, num_logprobs=2).token_ids < 0).tolist() == [False, True, False]
    logits[1] = -np.inf
    assert (draw(logits, [sampled] * 3, [0] * 3).token_ids < 0).tolist() == [False, True, False]


def test_sampler_gives_log_probabilities_of_the_models_own_distribution() -> None:
    logits = logits_of(3, 200)
    params = [GREEDY, SamplingParams(temperature=2.0, top_k=3, seed=7), SamplingParams(temperature=0.5, seed=8)]
    drawn = draw(logits, params, [0, 1, 2], num_logprobs=4)
    scores = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(drawn.logprobs, scores[range(3), drawn.token_ids], rtol=1e-6)
    np.testing.assert_array_equal(drawn.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :4])
    np.testing.assert_allclose(drawn.top_logprobs, np.sort(scores)[:, :-5:-1], rtol=1e-6)
    chosen = draw(logits, params, [0, 1, 2], num_logprobs=0)
    np.testing.assert_array_equal(chosen.logprobs, drawn.logprobs)
    assert chosen.top_ids.shape == (3, 0)
    assert not draw(logits, params, [0, 1, 2]).logprobs.any()


def test_sampler_counts_from_the_position_of_a_rows_last_new_token() -> None:
    logits = logits_of(1, 500, scale=0.5)
    params = [SamplingParams(temperature=1.0, seed=3)]
    alone = draw(logits, params, [6]).token_ids
    batch = batch_of([[0, 0, 0]], [4], [1], params=params)
    assert sample(logits, batch).token_ids == alone


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 0.25, 1.0, 1e9]), min_size=1, max_size=400).filter(any),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_sampler_invert_picks_a_weight_that_covers_the_point(weights: list[float], uniform: float) -> None:
    array = np.array(weights)
    index = invert(array, uniform)
    assert array[index] > 0
    point, total = uniform * array.sum(), array.sum()
    assert array[:index].sum() <= point + 1e-9 * total
    assert array[: index + 1].sum() >= point - 1e-9 * total
