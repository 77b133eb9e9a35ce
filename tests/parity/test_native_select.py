"""The end of a step, Select, against its eager reference: greedy, sampled, likeliest tokens, and rows apart.

Logits differ in their last bits from the reference's, so a sampled token may differ where the random number falls on
an edge: such a draw must then be within a part in ten thousand of the token's share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.model.ops.counter_random import uniform_at
from antiphon.model.ops.native_select import distribution, select
from antiphon.model.ops.packing import pack_float, pack_int8, unpack_int8
from tests.parity.native_nodes import normal, ramp, run_node

EDGE = 1e-4
EXAMPLES = settings(max_examples=60)
Arrays = dict[str, NDArray[Any]]
ROW = st.tuples(
    st.integers(1, 3),  # new tokens
    st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),  # temperature
    st.sampled_from([0, 1, 3, 40, 100_000]),  # top_k
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),  # top_p
    st.integers(0, 2**64 - 1),  # seed
)
ROWS = st.lists(ROW, min_size=1, max_size=6)
Row = tuple[int, float, int, float, int]


def settings_of(rows: list[Row], num_logprobs: int = -1) -> Arrays:
    counts, temperatures, top_ks, top_ps, seeds = zip(*rows, strict=True)
    random = np.random.default_rng(len(rows))
    starts = random.integers(0, 2000, len(rows))
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return {
        "offsets": ramp(counts),
        "positions": np.concatenate(positions).astype(np.int32),
        "temperatures": np.array(temperatures, np.float32),
        "top_ks": np.array(top_ks, np.int32),
        "top_ps": np.array(top_ps, np.float32),
        "seeds": np.array(seeds, np.uint64).view(np.int64),
        "num_logprobs": np.array([num_logprobs], np.int32),
    }


def reference(hidden: NDArray[Any], weight: NDArray[Any], held: Arrays) -> list[NDArray[Any]]:
    tensors = map(torch.from_numpy, (hidden, weight, *held.values()))
    return [output.numpy() for output in select(*tensors)]


def run_select(hidden: NDArray[Any], weight: NDArray[Any], held: Arrays, *, threads: int = 1) -> list[NDArray[Any]]:
    inputs = {"hidden": hidden, "weight": pack_float(weight), **held}
    return run_node("Select", inputs, threads=threads, vocab=len(weight))


def may_draw(logits: NDArray[np.float32], row: Row, position: int, token: int) -> bool:
    """Whether this draw is right, or right for a number next to the random one."""
    _, temperature, top_k, top_p, seed = row
    ids, weights = distribution(logits, temperature, top_k, min(1.0, top_p * (1 + EDGE)))
    edges = np.concatenate([[0], np.cumsum(weights)]) / weights.sum()
    index = int(np.searchsorted(ids, token))
    if index == len(ids) or ids[index] != token:
        return False
    # A token more or less at the nucleus' edge scales every share.
    slack = EDGE + weights.min() / weights.sum()
    return bool(edges[index] - slack <= uniform_at(seed, position) <= edges[index + 1] + slack)


@EXAMPLES
@given(ROWS, st.integers(1, 100), st.integers(1, 700), st.integers(-1, 8))
def test_select_equals_eager(rows: list[Row], width: int, vocab: int, num_logprobs: int) -> None:
    held = settings_of(rows, min(num_logprobs, vocab))
    hidden, weight = normal(len(held["positions"]), width), normal(vocab, width)
    found, expected = run_select(hidden, weight, held), reference(hidden, weight, held)
    last = held["offsets"][1:] - 1
    logits = (torch.from_numpy(hidden[last]) @ torch.from_numpy(weight).T).numpy()
    for index, row in enumerate(rows):
        token, wanted = int(found[0][index]), int(expected[0][index])
        position = int(held["positions"][last[index]])
        assert token == wanted or (row[1] > 0 and may_draw(logits[index], row, position, token))
    same = found[0] == expected[0]
    np.testing.assert_allclose(found[1][same], expected[1][same], rtol=1e-5, atol=1e-4)
    assert found[2].shape == expected[2].shape == (len(rows), max(0, min(num_logprobs, vocab)))
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-5, atol=1e-4)


@EXAMPLES
@given(ROWS, st.integers(1, 600))
def test_rows_are_bit_identical_alone_and_on_two_threads(rows: list[Row], vocab: int) -> None:
    held, weight = settings_of(rows, 3 if vocab >= 3 else 0), normal(vocab, 48)
    hidden = normal(len(held["positions"]), 48)
    found = run_select(hidden, weight, held, threads=2)
    for row in range(len(rows)):
        tokens = slice(*held["offsets"][row : row + 2])
        alone = {name: array[[row]] if len(array) == len(rows) else array for name, array in held.items()}
        alone |= {
            "offsets": ramp([tokens.stop - tokens.start]),
            "positions": held["positions"][tokens],
            "num_logprobs": held["num_logprobs"],
        }
        for single, together in zip(run_select(hidden[tokens], weight, alone), found, strict=True):
            np.testing.assert_array_equal(single[0], together[row])


@EXAMPLES
@given(ROWS, st.integers(1, 100), st.integers(3, 300))
def test_quantized_select_equals_select_of_what_it_holds(rows: list[Row], width: int, vocab: int) -> None:
    held = settings_of(rows, vocab)
    hidden, packed = normal(len(held["positions"]), width), pack_int8(normal(vocab, width))
    parts: Arrays = {"weight": packed.integers, "scales": packed.scales, "column_sums": packed.column_sums}
    found = run_node("QuantizedSelect", {"hidden": hidden, **parts, **held}, vocab=vocab)
    # The hidden states as 8 bits hold them.
    positive = (hidden >= 0).all(axis=1, keepdims=True)
    step = np.abs(hidden).max(axis=1, keepdims=True) / np.where(positive, 255, 127).astype(np.float32)
    weight = (unpack_int8(packed.integers, vocab, width) * packed.scales[:vocab, None]).astype(np.float32)
    expected = reference((np.rint(hidden / step) * step).astype(np.float32), weight, held)
    by_id = [np.take_along_axis(values[3], values[2].argsort(axis=1), axis=1) for values in (found, expected)]
    # A hidden state on the edge between two levels may fall either way.
    slack = 1e-3 + 127 * packed.scales.max() * step.max()
    np.testing.assert_allclose(by_id[0], by_id[1], atol=slack)
    assert (np.abs(by_id[0] - by_id[1]) < 1e-3).mean() > 0.9


def plain(rows: int, num_logprobs: int = -1) -> Arrays:
    return settings_of([(1, 0.0, 0, 1.0, 0)] * rows, num_logprobs)


def test_ties_go_to_the_lowest_id() -> None:
    weight = np.zeros((90, 8), np.float32)
    weight[[3, 40, 41, 77]] = 1
    found = run_select(np.ones((1, 8), np.float32), weight, plain(1, 6))
    assert found[0].tolist() == [3]
    assert found[2].tolist() == [[3, 40, 41, 77, 0, 1]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_numbers_that_are_not_finite_are_told_apart(value: float, temperature: float) -> None:
    hidden, weight = normal(3, 16), normal(50, 16)
    hidden[1] = value
    held = settings_of([(1, temperature, 0, 1.0, seed) for seed in (1, 2, 3)], 2)
    found = run_select(hidden, weight, held)
    assert found[0][1] == -1
    assert (found[0][[0, 2]] >= 0).all()
    others = {name: array[[0, 2]] if len(array) == 3 else array for name, array in held.items()}
    others["offsets"] = ramp([1, 1])
    for beside, apart in zip(found, run_select(hidden[[0, 2]], weight, others), strict=True):
        np.testing.assert_array_equal(beside[[0, 2]], apart)


def test_samples_follow_the_distribution() -> None:
    """One hidden state at 4000 positions: frequencies are the probabilities, within five deviations."""
    draws, vocab = 4000, 12
    hidden, weight = np.repeat(normal(1, 6), draws, axis=0), normal(vocab, 6)
    held = settings_of([(1, 0.8, 0, 1.0, 2**63 + 11)] * draws)
    held["positions"] = np.arange(draws, dtype=np.int32)
    found = run_select(hidden, weight, held)[0]
    _, weights = distribution(weight @ hidden[0], 0.8, 0, 1.0)
    share = weights / weights.sum()
    deviation = np.sqrt(share * (1 - share) / draws)
    assert (np.abs(np.bincount(found, minlength=vocab) / draws - share) < 5 * deviation + 1e-3).all()
