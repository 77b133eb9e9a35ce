"""The end of a step, Sample, against the NumPy account of it: every control, alone and together, and rows apart.

Hidden states and weights are few multiples of powers of two, so logits are exact in any order of addition and tokens
must be equal, ties included. Only exponentials and their sums differ in the last bits, so a sampled token can differ
when a random number or the end of a nucleus is on a boundary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.export.bundle_model import sampling_inputs
from antiphon.export.weights import pack_float, pack_int8, unpack_int8
from antiphon.ops.logits_warpers import Warp, distribution
from antiphon.ops.sampling import NONE_ALLOWED, NOT_FINITE, Samples, SamplingArrays, sample, uniform_at, warp_of
from tests.batches import SampleSettings, sampling_of
from tests.operators import Floats, normal, packed_weight
from tests.parity.native_nodes import run_node

EDGE = 1e-4
EXAMPLES = settings(max_examples=80)
Arrays = dict[str, NDArray[Any]]


def unselected(vocab: int) -> st.SearchStrategy[SampleSettings]:
    ids = st.integers(0, vocab - 1)
    edit = st.tuples(
        ids,
        st.sampled_from([0.0, 0.5, -3.0, 8.0]),
        st.sampled_from([1.0, 0.5, 1.25, 4.0]),
        st.sampled_from([0.0, -0.25, 2.0, -np.inf]),
    )
    return st.builds(
        SampleSettings,
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 100_000]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
        typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 0.01]),
        seed=st.integers(0, 2**64 - 1),
        forced_id=st.just(-1) | st.just(-1) | ids,
        num_logprobs=st.integers(-1, min(vocab + 2, 8)),
        is_normalized=st.booleans(),
        restriction=st.sampled_from([0, 0, 0, 1]),
        edits=st.just([]) | st.lists(edit, max_size=12),
    )


def own_vocabulary(vocab: int) -> st.SearchStrategy[SampleSettings]:
    return unselected(vocab).flatmap(lambda made: selected(made, vocab))


def sample_settings(vocab: int) -> st.SearchStrategy[SampleSettings]:
    forbidden = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=70)
    forbids = forbidden.map(lambda held: [(id_, 0.0, 1.0, -np.inf) for id_ in held])
    forbidding = st.builds(SampleSettings, edits=forbids)
    return unselected(vocab) | own_vocabulary(vocab) | forbidding


@st.composite
def selected(draw: st.DrawFn, made: SampleSettings, vocab: int) -> SampleSettings:
    """Return the sample with a vocabulary of its own: its edits begin with one of each token, by rising id."""
    others = draw(st.sets(st.integers(0, vocab - 1), max_size=300))
    forced = {made.forced_id} - {-1}
    ids = sorted(others | forced | {edit[0] for edit in made.edits}) or [0]
    values = st.sampled_from([(0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.5, 1.25, -0.25), (0.0, 1.0, -np.inf)])
    first = [(id_, *draw(values)) for id_ in ids]
    later = [edit for edit in made.edits if edit[0] <= ids[-1]]
    return replace(made, restriction=2, edits=[*first, *later])


@st.composite
def steps(
    draw: st.DrawFn, settings_of: Callable[[int], st.SearchStrategy[SampleSettings]] = sample_settings
) -> tuple[Floats, Floats, NDArray[np.int32], SamplingArrays]:
    """Hidden states [N, M], weights [V, M], positions [N] and parameters of samples after some of the tokens."""
    vocab, width, tokens = draw(st.integers(1, 700)), draw(st.integers(1, 60)), draw(st.integers(1, 5))
    held = draw(st.lists(settings_of(vocab), min_size=1, max_size=6))
    picks = [draw(st.integers(0, tokens - 1)) for _ in held]
    random = np.random.default_rng([vocab, width, tokens])
    hidden, weight = exact(random, tokens, width), exact(random, vocab, width)
    return hidden, weight, random.integers(0, 2000, tokens, np.int32), sampling_of(picks, held)


def exact(random: np.random.Generator, *shape: int) -> Floats:
    return (random.integers(-8, 9, shape) / 8).astype(np.float32)


def run_sample(
    hidden: Floats,
    weight: Floats,
    positions: NDArray[np.int32],
    held: SamplingArrays,
    *,
    bias: Floats | None = None,
    threads: int = 1,
    **attributes: Any,
) -> Samples:
    operands: Arrays = {"hidden": hidden, "weight": pack_float(weight), "positions": positions, **sampling_inputs(held)}
    if bias is not None:
        operands["bias"] = bias
    return Samples(*run_node("Sample", operands, threads=threads, vocab=len(weight), **attributes))


def subset(held: SamplingArrays, rows: list[int]) -> SamplingArrays:
    """Return parameters of some of the samples, with their edits."""
    spans = [range(held.edit_offsets[row], held.edit_offsets[row + 1]) for row in rows]
    edits = [index for span in spans for index in span]
    whole = {field.name: getattr(held, field.name) for field in fields(held)}
    return SamplingArrays(
        **{name: array[rows] for name, array in whole.items() if not name.startswith("edit")},
        edit_offsets=np.cumsum([0, *map(len, spans)], dtype=np.int32),
        edit_ids=held.edit_ids[edits],
        edit_values=held.edit_values[edits],
    )


def may_draw(values: Floats, warp: Warp, uniform: float, token: int) -> bool:
    """Return whether a sample is right for a random number and limits close to the true ones."""
    for top_p, min_p, typical_p in itertools.product((1 - EDGE, 1, 1 + EDGE), repeat=3):
        near = replace(
            warp, top_p=warp.top_p * top_p, min_p=min(1.0, warp.min_p * min_p), typical_p=warp.typical_p * typical_p
        )
        ids, weights = distribution(values, near)
        held = np.arange(len(values)) if ids is None else ids
        edges = np.concatenate([[0], np.cumsum(weights)]) / weights.sum()
        index = int(np.searchsorted(held, token))
        if index < len(held) and held[index] == token and edges[index] - EDGE <= uniform <= edges[index + 1] + EDGE:
            return True
    return False


def values_of(logits: Floats, held: SamplingArrays, row: int) -> Floats:
    """The edited values [V] of one sample, up to a number that all of them share: the scores of every token."""
    everything = subset(held, [row])
    everything.ints("num_logprobs")[:] = len(logits)
    drawn = sample(logits[None], everything, np.zeros(1, np.int32))
    values = np.full(len(logits), -np.inf, np.float32)
    listed = drawn.top_ids[0] >= 0
    values[drawn.top_ids[0][listed]] = drawn.top_scores[0][listed]
    return values


@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-7, 1e-5, 1.0])
def test_candidates_of_a_beam_are_the_same_with_a_neutral_edit(spread: float) -> None:
    """Without edits no row of log-probabilities is made, but tokens of equal log-probability must still tie."""
    random = np.random.default_rng(5)
    logits = np.float32(3) + (spread * random.permutation(4000)).astype(np.float32)
    beam = SampleSettings(num_logprobs=8, is_normalized=True)
    neutral = replace(beam, edits=[(3650, 0.0, 1.0, 0.0)])
    hidden = np.ones((1, 1), np.float32)
    drawn = run_sample(hidden, logits[:, None], np.zeros(1, np.int32), sampling_of([0, 0], [beam, neutral]))
    for field in fields(drawn):
        without, with_edit = getattr(drawn, field.name)
        assert without.tobytes() == with_edit.tobytes(), field.name
    assert len(set(drawn.top_ids[0].tolist())) == 8


@EXAMPLES
@given(steps(), st.booleans())
def test_sample_gives_the_tokens_of_numpy(
    step: tuple[Floats, Floats, NDArray[np.int32], SamplingArrays], has_bias: bool
) -> None:
    hidden, weight, positions, held = step
    bias = exact(np.random.default_rng(len(weight)), len(weight)) if has_bias else None
    logits, places = hidden[held.picks] @ weight.T + (0 if bias is None else bias), positions[held.picks]
    found, expected = run_sample(hidden, weight, positions, held, bias=bias), sample(logits, held, places)
    for row in np.flatnonzero(found.token_ids != expected.token_ids).tolist():
        assert held.floats("temperature")[row] > 0, (row, found.token_ids[row], expected.token_ids[row])
        uniform = uniform_at(int(held.seeds[row]), int(places[row]))
        assert may_draw(values_of(logits[row], held, row), warp_of(held, row), uniform, int(found.token_ids[row]))
    same = found.token_ids == expected.token_ids
    np.testing.assert_allclose(found.logprobs[same], expected.logprobs[same], rtol=1e-5, atol=2e-4)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(found.top_scores, expected.top_scores, rtol=1e-5, atol=2e-4)


@EXAMPLES
@given(steps(), st.integers(0, 2**32 - 1))
def test_samples_are_bit_identical_alone_and_on_two_threads(
    step: tuple[Floats, Floats, NDArray[np.int32], SamplingArrays], seed: int
) -> None:
    _, weight, positions, held = step
    hidden, weight = normal(len(positions), weight.shape[1], seed=seed), normal(*weight.shape, seed=seed)
    found = run_sample(hidden, weight, positions, held, threads=2)
    for row in range(len(held)):
        token = held.picks[row]
        single = replace(subset(held, [row]), picks=np.zeros(1, np.int32))
        alone = run_sample(hidden[[token]], weight, positions[[token]], single)
        np.testing.assert_array_equal(alone.token_ids[0], found.token_ids[row])
        np.testing.assert_array_equal(alone.logprobs[0], found.logprobs[row])
        width = alone.top_ids.shape[1]
        for name in ("top_ids", "top_logprobs", "top_scores"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(found, name)[row, :width])
        assert (found.top_ids[row, width:] == -1).all()


def held_by_8_bits(hidden: Floats, *, is_fused: bool) -> Floats:
    """Quantise hidden states to 8 bits and back. is_fused: multiplication and addition are rounded once."""
    is_positive = (hidden >= 0).all(axis=1, keepdims=True)
    levels, zero = np.where(is_positive, 255, 127).astype(np.float32), np.where(is_positive, 0, 128)
    size = np.abs(hidden).max(axis=1, keepdims=True)
    inverse = levels / size
    scaled = hidden.astype(np.float64) * inverse if is_fused else (hidden * inverse).astype(np.float64)
    integers = np.rint((scaled + zero).astype(np.float32)) - zero
    return np.asarray(integers * (size / levels), np.float32)


@EXAMPLES
@given(st.integers(1, 18), st.integers(1, 100), st.integers(1, 300))
@example(14, 59, 3)  # row 13 has such a state
def test_quantized_sample_equals_sample_of_the_dequantised_weights(tokens: int, width: int, vocab: int) -> None:
    """Row by row: a hidden state on the edge between two levels falls one way with, one way without fused products."""
    held = sampling_of(range(tokens), [SampleSettings(num_logprobs=vocab)] * tokens)
    hidden, values = normal(tokens, width), normal(vocab, width)
    packed = pack_int8(values)
    bias = normal(vocab, seed=3)
    operands = {
        "hidden": hidden,
        **packed_weight(values, "int8"),
        "positions": np.zeros(tokens, np.int32),
        **sampling_inputs(held),
        "bias": bias,
    }
    found = Samples(*run_node("QuantizedSample", operands, vocab=vocab))
    weight = (unpack_int8(packed.integers, vocab, width) * packed.scales[:vocab, None]).astype(np.float32)
    scores = np.take_along_axis(found.top_logprobs, found.top_ids.argsort(axis=1), axis=1)
    errors = []
    for is_fused in (True, False):
        logits = (held_by_8_bits(hidden, is_fused=is_fused) @ weight.T + bias).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        errors.append(np.abs(scores - expected).max(axis=1))
    assert (np.minimum(*errors) < 1e-3).all()


@EXAMPLES
@given(steps(own_vocabulary), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 2.0]))
def test_own_vocabularies_need_only_their_columns_of_a_constant_int8_weight(
    step: tuple[Floats, Floats, NDArray[np.int32], SamplingArrays], seed: int, cap: float
) -> None:
    """A weight that is fed may change at every call, so that whole panels are multiplied."""
    _, weight, positions, held = step
    vocab, width = weight.shape
    operands = {
        "hidden": normal(len(positions), width, seed=seed),
        **packed_weight(normal(vocab, width, seed=seed), "int8"),
        "positions": positions,
        **sampling_inputs(held),
        "bias": normal(vocab, seed=seed) if seed % 2 else None,
    }
    constants = {"weight", "scales", "column_sums"}
    found = run_node("QuantizedSample", operands, constants=constants, vocab=vocab, cap=cap)
    expected = run_node("QuantizedSample", operands, vocab=vocab, cap=cap)
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@EXAMPLES
@given(steps(own_vocabulary) | steps())
def test_edits_without_values_are_neutral(step: tuple[Floats, Floats, NDArray[np.int32], SamplingArrays]) -> None:
    hidden, weight, positions, held = step
    neutral = np.tile(np.array((0, 1, 0), np.float32), (len(held.edit_ids), 1))
    logits, places = hidden[held.picks] @ weight.T, positions[held.picks]
    without, explicit = (replace(held, edit_values=values) for values in (neutral[:0], neutral))
    native = [run_sample(hidden, weight, positions, given) for given in (without, explicit)]
    reference = [sample(logits, given, places) for given in (without, explicit)]
    for name in Samples.__slots__:
        for found, expected in (native, reference):
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name


def plain(rows: int, **changes: Any) -> SamplingArrays:
    return sampling_of(range(rows), [SampleSettings(**changes)] * rows)


def places(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


def test_sample_limits_the_logits() -> None:
    random = np.random.default_rng(4)
    hidden, weight = (random.standard_normal((rows, 24), np.float32) for rows in (3, 531))
    found = run_sample(hidden, weight, places(3), plain(3, num_logprobs=5), cap=2.0)
    limited = torch.from_numpy(2 * np.tanh(hidden @ weight.T / 2)).log_softmax(dim=-1).topk(5)
    assert found.top_ids.tolist() == limited.indices.tolist()
    np.testing.assert_allclose(found.top_logprobs, limited.values.numpy(), atol=2e-6)


def test_sample_takes_the_lowest_id_when_logits_are_equal() -> None:
    weight = np.zeros((90, 8), np.float32)
    weight[[3, 40, 41, 77]] = 1
    found = run_sample(np.ones((1, 8), np.float32), weight, places(1), plain(1, num_logprobs=6))
    assert found.token_ids.tolist() == [3]
    assert found.top_ids.tolist() == [[3, 40, 41, 77, 0, 1]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"forced_id": 4}, {"edits": [(3, 0.0, 1.0, -np.inf)]}])
def test_sample_reports_exactly_the_rows_that_are_not_finite(value: float, changes: dict[str, Any]) -> None:
    hidden, weight = normal(3, 16), normal(50, 16)
    hidden[1] = value
    held = plain(3, num_logprobs=2, **changes)
    found = run_sample(hidden, weight, places(3), held)
    assert found.token_ids[1] == NOT_FINITE
    assert found.top_ids[1].tolist() == [-1, -1]
    assert (found.token_ids[[0, 2]] >= 0).all()
    beside = run_sample(hidden[[0, 2]], weight, places(3)[[0, 2]], plain(2, num_logprobs=2, **changes))
    for name in Samples.__slots__:
        np.testing.assert_array_equal(getattr(found, name)[[0, 2]], getattr(beside, name))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_reports_a_sample_without_an_allowed_token(temperature: float) -> None:
    held = sampling_of(
        range(2), [SampleSettings(temperature=temperature, restriction=1, num_logprobs=2), SampleSettings()]
    )
    found = run_sample(normal(2, 8), normal(30, 8), places(2), held)
    assert found.token_ids[0] == NONE_ALLOWED
    assert found.token_ids[1] >= 0
    assert found.top_ids[0].tolist() == [-1, -1]
    assert found.top_scores[0].tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("temperature", [1e-45, 1.0, 3e38, np.inf])
def test_forbidden_tokens_are_never_sampled_at_any_temperature(temperature: float) -> None:
    allowed = [(token_id, 0.0, 1.0, 0.0) for token_id in (7, 300)]
    held = sampling_of(
        [0] * 64,
        [SampleSettings(temperature=temperature, restriction=1, edits=allowed, seed=seed) for seed in range(64)],
    )
    found = run_sample(normal(1, 8), normal(400, 8), places(1), held)
    assert set(found.token_ids.tolist()) <= {7, 300}


def row_of(logits: Floats) -> tuple[Floats, Floats]:
    """Return hidden states [1, 1] and weights [V, 1] whose product is these logits."""
    return np.ones((1, 1), np.float32), logits[:, None]


def drawn(logits: Floats, count: int, **changes: Any) -> list[int]:
    """Return the tokens that a number of seeds sample from one row of logits [V]."""
    hidden, weight = row_of(logits)
    held = sampling_of([0] * count, [SampleSettings(seed=seed, **changes) for seed in range(count)])
    found: list[int] = run_sample(hidden, weight, places(1), held).token_ids.tolist()
    return found


NARROWED: dict[str, dict[str, Any]] = {
    "top_k": dict(top_k=3000),
    "top_p": dict(top_p=0.99),
    "nearly all of top_p": dict(top_p=1 - 1e-6),
    "typical_p": dict(typical_p=0.95),
    "all": dict(top_k=6000, top_p=0.99, min_p=1e-4, typical_p=0.95),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NARROWED))
@pytest.mark.parametrize("temperature", [0.05, 2.0, 100.0])
@pytest.mark.parametrize("vocab", [8000, 32_000])
def test_large_vocabularies_are_warped_as_by_numpy(vocab: int, temperature: float, name: str) -> None:
    """Logits far apart and close together use the buckets, and not only the few tokens that are sorted."""
    logits = 3 * normal(vocab, seed=1)
    logits[::7] = logits[1::7][: len(logits[::7])]  # ties
    changes: dict[str, Any] = dict(temperature=temperature, **NARROWED[name])
    held = sampling_of([0] * 40, [SampleSettings(seed=seed, **changes) for seed in range(40)])
    hidden, weight = row_of(logits)
    found = run_sample(hidden, weight, places(1), held).token_ids
    expected = sample(np.repeat(logits[None], 40, axis=0), held, np.zeros(40, np.int32)).token_ids
    for row in np.flatnonzero(found != expected).tolist():
        assert may_draw(logits, warp_of(held, row), uniform_at(row, 0), int(found[row]))


@pytest.mark.parametrize("level", [0.0, -0.0, -30.0, 1e30])
@pytest.mark.parametrize("vocab", [65, 700, 9000])
def test_warpers_keep_the_lowest_ids_of_equal_logits(vocab: int, level: float) -> None:
    logits = np.full(vocab, level, np.float32)
    logits[::2] += 0.0  # one zero of each sign
    half = -(-vocab // 2)
    for changes in (dict(top_p=0.5), dict(top_k=half), dict(top_p=0.5, min_p=1.0, typical_p=0.9)):
        tokens = drawn(logits, 400, temperature=1.0, **changes)
        assert half - 1 - half // 8 <= max(tokens) < half
    assert max(drawn(logits, 400, temperature=1.0, typical_p=0.5)) >= half  # all are equally close to the entropy


def test_nucleus_can_end_within_a_group_of_equal_logits() -> None:
    """Two tokens have weight 1 and a thousand 1/e: half of the mass is the first two and 497.3 of the others."""
    logits = np.full(1002, -1.0, np.float32)
    logits[[400, 900]] = 0.0
    kept = set(drawn(logits, 8000, temperature=1.0, top_p=0.5))
    last = -(-(0.5 * (2 + 1000 / np.e) - 2) // (1 / np.e))  # equal tokens that are kept: the lowest ids
    expected = {400, 900} | set([index for index in range(1002) if index not in (400, 900)][: int(last)])
    assert kept <= expected
    assert len(kept) > 0.99 * len(expected)


@pytest.mark.parametrize("changes", list(NARROWED.values()))
def test_warpers_never_keep_forbidden_tokens(changes: dict[str, Any]) -> None:
    logits = np.full(9000, -np.inf, np.float32)
    logits[[3, 4000, 8999]] = [0.0, 0.0, -1e-3]
    assert set(drawn(logits, 100, temperature=1.0, **changes)) <= {3, 4000, 8999}


def test_samples_follow_the_distribution() -> None:
    """Frequencies over 4000 positions of one hidden state are the probabilities, within five standard deviations."""
    draws, vocab = 4000, 12
    hidden, weight = np.repeat(normal(1, 6), draws, axis=0), normal(vocab, 6)
    held = plain(draws, temperature=0.8, seed=2**63 + 11)
    found = run_sample(hidden, weight, places(draws), held).token_ids
    _, weights = distribution(weight @ hidden[0], Warp(temperature=0.8))
    share = weights / weights.sum()
    deviation = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(np.bincount(found, minlength=vocab) / draws - share) < 5 * deviation + 1e-3).all()
