"""Sampling in NumPy against transformers' processors and warpers and its own distribution; its reported stages."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.controls.table import MAX_SEED
from antiphon.ops.logits_warpers import (
    Stage,
    StageDistribution,
    Warp,
    distribution,
    ids_of_largest,
    invert,
    likeliest_ids,
    sample_token,
    sampling_stages,
)
from antiphon.ops.sampling import (
    NONE_ALLOWED,
    NOT_FINITE,
    Samples,
    SamplingArrays,
    greedy_sampling,
    sample,
    seed_of_output,
    uniform_at,
)
from tests.batches import SampleSettings, sampling_of
from tests.unit.sampling.sampling_reference import Logits, log_softmax, logits_of, reference_probabilities

GREEDY = SampleSettings()
FORBIDDEN = -np.inf


def draw(logits: Logits, settings: list[SampleSettings], positions: list[int] | None = None) -> Samples:
    """Choose after rows of logits, one each; where these stand matters to draws only."""
    held = np.array(positions or [0] * len(settings), np.int32)
    return sample(logits, sampling_of(range(len(settings)), settings), held)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """Settings of one request for transformers' processors."""

    bias: dict[int, float]
    penalised: list[int]
    penalty: float
    suppressed: list[int]

    @property
    def edits(self) -> list[tuple[int, float, float, float]]:
        """Return the settings as logits processors of single tokens; a token can have several."""
        edits = [(token_id, value, 1.0, 0.0) for token_id, value in self.bias.items()]
        edits += [(token_id, 0.0, self.penalty, 0.0) for token_id in self.penalised]
        return edits + [(token_id, 0.0, 1.0, FORBIDDEN) for token_id in self.suppressed]


def controls(vocab_size: int) -> st.SearchStrategy[Control]:
    ids = st.integers(0, vocab_size - 1)
    return st.builds(
        Control,
        bias=st.dictionaries(ids, st.floats(-20, 20, width=32), max_size=5),
        penalised=st.lists(ids, min_size=1, max_size=5, unique=True),
        penalty=st.floats(0.25, 4, width=32),
        suppressed=st.lists(ids, max_size=5, unique=True),
    )


def reference_scores(scores: NDArray[np.float64], control: Control) -> NDArray[np.float64]:
    """Return the logits [V] after transformers' processors of the same controls."""
    torch = pytest.importorskip("torch")
    held = pytest.importorskip("transformers.generation.logits_process")
    chain = held.LogitsProcessorList([])
    if control.bias:
        chain.append(held.SequenceBiasLogitsProcessor({(key,): value for key, value in control.bias.items()}))
    chain.append(held.RepetitionPenaltyLogitsProcessor(control.penalty))
    chain.append(held.SuppressTokensLogitsProcessor(control.suppressed, device="cpu"))
    return np.asarray(chain(torch.tensor([control.penalised]), torch.from_numpy(scores)[None])[0].numpy())


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab_size=st.integers(2, 30), is_normalized=st.booleans())
def test_samples_are_edited_as_by_transformers(data: st.DataObject, vocab_size: int, is_normalized: bool) -> None:
    control = data.draw(controls(vocab_size))
    logits = logits_of(1, vocab_size, seed=data.draw(st.integers(0, 10**6)))
    log_probabilities = log_softmax(logits[0])
    before = log_probabilities if is_normalized else logits[0].astype(np.float64)
    expected = reference_scores(before, control)
    choice = SampleSettings(num_logprobs=vocab_size, is_normalized=is_normalized, edits=control.edits)
    drawn = draw(logits, [choice])
    held = drawn.top_ids[0] >= 0
    assert sorted(drawn.top_ids[0, held]) == np.flatnonzero(expected > -np.inf).tolist()
    shift = 0.0 if is_normalized else log_probabilities[0] - logits[0, 0]
    ids = drawn.top_ids[0, held]
    np.testing.assert_allclose(drawn.top_scores[0, held], expected[ids] + shift, atol=1e-5)
    np.testing.assert_allclose(drawn.top_logprobs[0, held], log_probabilities[ids], atol=1e-5)
    if held.any():
        assert expected[drawn.token_ids[0]] >= expected.max() - 1e-5
        assert drawn.token_ids[0] == drawn.top_ids[0, 0]
    else:
        assert drawn.token_ids[0] == NONE_ALLOWED


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_samples_come_from_what_the_edits_left(data: st.DataObject, seed: int) -> None:
    control, logits = data.draw(controls(12)), logits_of(1, 12, seed=seed)
    warp = Warp(temperature=1.5, top_k=6, min_p=0.05, typical_p=0.8)
    expected = reference_scores(logits[0].astype(np.float64), control)
    kept = reference_probabilities(expected.astype(np.float32), warp)
    choice = SampleSettings(temperature=1.5, top_k=6, min_p=0.05, typical_p=0.8, edits=control.edits)
    drawn = [draw(logits, [dataclasses.replace(choice, seed=seed)]).token_ids[0] for seed in range(20)]
    assert all(kept[token_id] > 0 for token_id in drawn)


def test_samples_edit_one_token_several_times_in_order() -> None:
    logits = np.array([[2.0, -3.0, 0.5]], np.float32)
    edits = [(0, 1.0, 2.0, -4.0), (1, 0.0, 1.0, 0.0), (0, 0.0, 3.0, 0.25), (0, 10.0, 1.0, 0.0)]
    drawn = draw(logits, [SampleSettings(num_logprobs=3, edits=edits)])
    value = ((2.0 + 1.0) / 2.0 - 4.0) * 3.0 + 0.25 + 10.0
    assert drawn.top_ids[0].tolist() == [0, 2, 1]
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(drawn.top_scores[0], np.array([value, 0.5, -3.0]) - log_sum, rtol=1e-6)


def test_samples_never_change_the_logits() -> None:
    logits = logits_of(4, 50)
    before = logits.copy()
    edits = [(3, 1.0, 2.0, 0.0), (4, 0.0, 1.0, FORBIDDEN)]
    kinds = [
        SampleSettings(edits=edits),
        SampleSettings(is_normalized=True, num_logprobs=2),
        SampleSettings(temperature=1.0, restriction=1, edits=edits),
        SampleSettings(temperature=2.0, top_p=0.5, typical_p=0.5),
    ]
    draw(logits, kinds)
    np.testing.assert_array_equal(logits, before)


def test_samples_are_exclusive_of_tokens_without_an_edit() -> None:
    logits = logits_of(1, 100)
    edits = [(7, 0.0, 1.0, 0.0), (40, 0.0, 1.0, 0.0), (41, 0.0, 1.0, FORBIDDEN)]
    drawn = draw(logits, [SampleSettings(restriction=1, num_logprobs=4, edits=edits)])
    best = max((7, 40), key=lambda token_id: float(logits[0, token_id]))
    assert drawn.token_ids[0] == best
    assert drawn.top_ids[0].tolist() == [best, 47 - best, -1, -1]
    assert np.isneginf(drawn.top_scores[0, 2:]).all()
    assert not drawn.top_logprobs[0, 2:].any()
    sampled = SampleSettings(restriction=1, temperature=5.0, edits=edits)
    found = {int(draw(logits, [dataclasses.replace(sampled, seed=seed)]).token_ids[0]) for seed in range(200)}
    assert found == {7, 40}


def test_samples_are_none_where_everything_is_forbidden() -> None:
    logits = logits_of(3, 4)
    all_forbidden = [(token_id, 0.0, 1.0, FORBIDDEN) for token_id in range(4)]
    kinds = [
        SampleSettings(edits=all_forbidden, num_logprobs=2),
        SampleSettings(restriction=1, temperature=1.0, num_logprobs=1),
        SampleSettings(edits=all_forbidden, forced_id=2, num_logprobs=1),
    ]
    drawn = draw(logits, kinds)
    assert drawn.token_ids.tolist() == [NONE_ALLOWED, NONE_ALLOWED, 2]
    assert drawn.logprobs[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(drawn.logprobs[2], log_softmax(logits[2])[2], rtol=1e-6)
    assert (drawn.top_ids == -1).all()
    assert not drawn.top_logprobs.any()
    assert np.isneginf(drawn.top_scores).all()


def test_samples_score_a_forced_token_and_draw_none() -> None:
    logits = logits_of(2, 60)
    kinds = [
        SampleSettings(forced_id=17, num_logprobs=3),
        SampleSettings(forced_id=5, temperature=1.0, edits=[(5, -9.0, 1.0, 0.0)]),
    ]
    drawn = draw(logits, kinds)
    assert drawn.token_ids.tolist() == [17, 5]
    np.testing.assert_allclose(drawn.logprobs, [log_softmax(logits[0])[17], 0.0], rtol=1e-6)
    np.testing.assert_array_equal(drawn.top_ids[0], np.argsort(-logits[0])[:3])


# 99.9 % of a chi-square with 7 degrees of freedom lie below.
CHI_SQUARE_7 = 24.32


def test_samples_drawn_over_seeds_follow_the_distribution() -> None:
    logits, num_draws = logits_of(1, 8, scale=1.0), 8000
    drawn = draw(
        np.repeat(logits, num_draws, axis=0), [SampleSettings(temperature=1.3, seed=seed) for seed in range(num_draws)]
    )
    observed = np.bincount(drawn.token_ids, minlength=8)
    expected = num_draws * reference_probabilities(logits[0], Warp(temperature=1.3))
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE_7


def test_samples_of_warped_logits_follow_the_distribution() -> None:
    logits = logits_of(1, 300, scale=1.0)
    warp = Warp(temperature=1.3, top_k=40, top_p=0.95, min_p=0.1, typical_p=0.9)
    expected = reference_probabilities(logits[0], warp)
    kept = np.flatnonzero(expected)
    kinds = [
        SampleSettings(temperature=1.3, top_k=40, top_p=0.95, min_p=0.1, typical_p=0.9, seed=seed)
        for seed in range(10_000)
    ]
    observed = np.bincount(draw(np.repeat(logits, len(kinds), axis=0), kinds).token_ids, minlength=300)
    assert observed[expected == 0].sum() == 0
    total, freedom = observed.sum(), len(kept) - 1
    chi_square = (((observed - total * expected) ** 2)[kept] / (total * expected[kept])).sum()
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom)  # 4.5 deviations of a chi-square


def choice_strategy(vocab_size: int) -> st.SearchStrategy[SampleSettings]:
    edit = st.tuples(
        st.integers(0, vocab_size - 1), st.sampled_from([0.0, 2.5]), st.sampled_from([1.0, 1.5]), st.just(-0.5)
    )
    return st.builds(
        SampleSettings,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 4, 100]),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        typical_p=st.sampled_from([0.7, 1.0]),
        seed=st.integers(0, MAX_SEED),
        forced_id=st.sampled_from([-1, -1, 0]),
        num_logprobs=st.integers(-1, 7),
        is_normalized=st.booleans(),
        restriction=st.sampled_from([0, 1]),
        edits=st.lists(edit, max_size=3),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(2, 9), vocab_size=st.sampled_from([5, 63, 257, 1031]))
def test_choice_is_bit_identical_alone_and_in_a_batch(data: st.DataObject, rows: int, vocab_size: int) -> None:
    kinds = data.draw(st.lists(choice_strategy(vocab_size), min_size=rows, max_size=rows))
    positions = data.draw(st.lists(st.integers(0, 500), min_size=rows, max_size=rows))
    logits = logits_of(rows, vocab_size, seed=data.draw(st.integers(0, 99)))
    logits[0, 0] = data.draw(st.sampled_from([0.0, np.nan]))
    together = draw(logits, kinds, positions)
    order = data.draw(st.permutations(range(rows)))
    moved = draw(logits[order].copy(), [kinds[i] for i in order], [positions[i] for i in order])
    for field in dataclasses.fields(Samples):
        np.testing.assert_array_equal(getattr(moved, field.name), getattr(together, field.name)[order])
    for row in range(rows):
        alone = draw(logits[row : row + 1].copy(), [kinds[row]], [positions[row]])
        width = alone.top_ids.shape[1]
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[row], together.logprobs[row])
        for name in ("top_ids", "top_logprobs", "top_scores"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row, :width])
        assert (together.top_ids[row, width:] == -1).all()


def test_samples_repeat_themselves_for_a_seed_and_differ_between_positions() -> None:
    logits = logits_of(1, 500, scale=0.5)
    kinds = [SampleSettings(temperature=1.0, seed=12)]
    once = [int(draw(logits, kinds, [position]).token_ids[0]) for position in range(30)]
    again = [int(draw(logits, kinds, [position]).token_ids[0]) for position in range(30)]
    assert once == again
    assert len(set(once)) > 15


def test_samples_take_the_lowest_id_among_equals() -> None:
    logits = np.array([[0.0, 5.0, 5.0, 1.0, 5.0]], np.float32)
    assert draw(logits, [GREEDY]).token_ids[0] == 1
    assert draw(logits, [SampleSettings(temperature=1.0, top_k=1)]).token_ids[0] == 1
    assert draw(logits, [SampleSettings(num_logprobs=2)]).top_ids[0].tolist() == [1, 2]
    assert draw(logits, [SampleSettings(num_logprobs=5)]).top_ids[0].tolist() == [1, 2, 4, 3, 0]
    assert draw(logits, [SampleSettings(edits=[(0, 5.0, 1.0, 0.0)])]).token_ids[0] == 0


def test_samples_are_greedy_in_the_limits_of_their_settings() -> None:
    logits = logits_of(6, 400)
    greedy = draw(logits, [GREEDY] * 6).token_ids
    for choice in (
        SampleSettings(temperature=1e-30, seed=5),
        SampleSettings(temperature=2.0, top_k=1, seed=5),
        SampleSettings(temperature=2.0, top_p=1e-9, seed=5),
        SampleSettings(temperature=2.0, min_p=1.0, seed=5),
    ):
        assert draw(logits, [choice] * 6, [3] * 6).token_ids.tolist() == greedy.tolist()


def test_samples_never_draw_a_token_the_model_forbids() -> None:
    logits = np.full((1, 600), -np.inf, np.float32)
    logits[0, [5, 300, 599]] = 0.0
    for top_k, top_p, typical_p in ((0, 1.0, 1.0), (10, 1.0, 1.0), (0, 0.99, 1.0), (10, 0.99, 1.0), (0, 1.0, 0.5)):
        kinds = [SampleSettings(temperature=1.0, top_k=top_k, top_p=top_p, typical_p=typical_p)]
        drawn = {int(draw(logits, kinds, [position]).token_ids[0]) for position in range(60)}
        assert drawn == {5, 300, 599}
    assert draw(logits, [SampleSettings(num_logprobs=5)]).top_ids[0].tolist() == [5, 300, 599, -1, -1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_samples_mark_only_the_row_whose_logits_are_not_finite(bad: float) -> None:
    logits = logits_of(3, 50)
    logits[1, 7] = bad
    for choice in (
        SampleSettings(num_logprobs=2),
        SampleSettings(temperature=1.0, num_logprobs=2),
        SampleSettings(forced_id=3, num_logprobs=2),
    ):
        drawn = draw(logits, [choice] * 3)
        assert (drawn.token_ids == NOT_FINITE).tolist() == [False, True, False]
        assert drawn.logprobs[1] == 0.0
        assert drawn.top_ids[1].tolist() == [-1, -1]
    logits[1] = -np.inf
    assert draw(logits, [SampleSettings(temperature=1.0)] * 3).token_ids.tolist()[1] == NOT_FINITE


def test_samples_give_log_probabilities_of_the_models_own_distribution() -> None:
    logits = logits_of(3, 200)
    kinds = [
        SampleSettings(num_logprobs=4),
        SampleSettings(temperature=2.0, top_k=3, seed=7, num_logprobs=4),
        SampleSettings(temperature=0.5, seed=8, num_logprobs=4),
    ]
    drawn = draw(logits, kinds, [0, 1, 2])
    scores = log_softmax(logits)
    np.testing.assert_allclose(drawn.logprobs, scores[range(3), drawn.token_ids], rtol=1e-6)
    np.testing.assert_array_equal(drawn.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :4])
    np.testing.assert_allclose(drawn.top_logprobs, np.sort(scores)[:, :-5:-1], rtol=1e-6)
    np.testing.assert_array_equal(drawn.top_scores, drawn.top_logprobs)
    chosen = draw(logits, [dataclasses.replace(kind, num_logprobs=0) for kind in kinds], [0, 1, 2])
    np.testing.assert_array_equal(chosen.logprobs, drawn.logprobs)
    assert chosen.top_ids.shape == (3, 0)
    assert not draw(logits, [GREEDY] * 3).logprobs.any()


def test_samples_give_each_the_log_probabilities_it_asks_for() -> None:
    logits = logits_of(4, 3)
    drawn = draw(logits, [SampleSettings(num_logprobs=count) for count in (-1, 0, 1, 5)])
    assert (drawn.top_ids >= 0).sum(axis=1).tolist() == [0, 0, 1, 3]
    assert (drawn.logprobs != 0).tolist() == [False, True, True, True]
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == drawn.top_scores.shape == (4, 5)


def test_greedy_sampling_has_neutral_parameters() -> None:
    built, listed = greedy_sampling(np.array([2, 0, 5], np.int32)), sampling_of([2, 0, 5])
    for field in dataclasses.fields(SamplingArrays):
        ours, theirs = getattr(built, field.name), getattr(listed, field.name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_no_samples_are_an_empty_result() -> None:
    drawn = sample(np.zeros((0, 9), np.float32), sampling_of([]), np.zeros(0, np.int32))
    assert drawn.token_ids.shape == (0,)
    assert drawn.top_ids.shape == (0, 0)


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
def test_every_stage_is_a_distribution_over_tokens_kept_before(seed: int, warp: Warp, is_edited: bool) -> None:
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
