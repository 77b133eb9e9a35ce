"""The end of a step in Triton's interpreter against `sample` of antiphon.ops.sampling, which the CPU kernels match."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from antiphon.ops.sampling import NONE_ALLOWED, NOT_FINITE, Samples, SamplingArrays
from antiphon.ops.sampling import sample as sample_in_numpy
from tests.batches import SampleSettings, sampling_of
from tests.cuda import node_launches

VOCAB_SIZE = 5003  # two parts of the vocabulary, the second one partly filled
NUM_CANDIDATES = 5
ABSENT = {"top_ids": -1, "top_logprobs": 0, "top_scores": -np.inf}

PLAIN = [
    SampleSettings(),
    SampleSettings(num_logprobs=0),
    SampleSettings(num_logprobs=3),
    SampleSettings(num_logprobs=NUM_CANDIDATES),
    SampleSettings(forced_id=17, num_logprobs=4),
    SampleSettings(is_normalized=True, num_logprobs=5),
]
DRAWN = [
    SampleSettings(temperature=1.0, seed=5),
    SampleSettings(temperature=0.7, top_k=50, seed=2**63 + 5),
    SampleSettings(temperature=1.3, top_p=0.9, seed=7, num_logprobs=2),
    SampleSettings(temperature=1.0, top_k=100, top_p=0.8, min_p=0.02, typical_p=0.7, seed=9),
    SampleSettings(temperature=1.0, min_p=0.1, seed=3),
    SampleSettings(temperature=0.9, typical_p=0.5, seed=31),
    SampleSettings(temperature=1e-30, seed=4),
    SampleSettings(temperature=50.0, top_k=1, seed=6),
]
EDITED = [
    SampleSettings(restriction=1, edits=[(4, 0, 1, 0), (9, 0.5, 1.2, 0), (4, 1.0, 2.0, 0.25)], num_logprobs=4),
    SampleSettings(edits=[(i, 0.0, 1.5, 0.0) for i in range(50)] + [(3, 0, 1, -np.inf)], temperature=1.0, seed=8),
    SampleSettings(restriction=1),
    SampleSettings(restriction=1, edits=[(7, 0, 1, -np.inf)], num_logprobs=1),
    SampleSettings(is_normalized=True, edits=[(i % 40, 0.1, 1.1, 0.2) for i in range(2100)], num_logprobs=3),
]


@pytest.mark.parametrize("settings", [PLAIN, DRAWN, EDITED], ids=["plain", "drawn", "edited"])
def test_sample_equals_the_reference(settings: list[SampleSettings]) -> None:
    logits = _logits(len(settings))
    check(logits, sampling_of(range(len(settings)), settings))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sample_adds_the_bias_to_rounded_logits(dtype: torch.dtype) -> None:
    settings = [SampleSettings(num_logprobs=2), SampleSettings(), SampleSettings(temperature=1.0, seed=3)]
    logits, bias = (torch.from_numpy(_logits(rows, seed)).to(dtype) for rows, seed in ((3, 1), (1, 2)))
    sampling = sampling_of(range(3), settings)
    positions = np.arange(3, dtype=np.int32)
    expected = sample_in_numpy((logits.float() + bias.float()).numpy(), sampling, positions)
    compare(_sample(logits, sampling, positions, bias[0]), expected)


def test_sample_takes_the_lowest_ids_of_ties() -> None:
    logits = np.zeros((4, VOCAB_SIZE), np.float32)
    logits[:, 3000:3010] = 2.0
    settings = [
        SampleSettings(num_logprobs=5),
        SampleSettings(),
        SampleSettings(temperature=1.0, top_k=3, seed=1),
        SampleSettings(temperature=1.0, top_p=0.001, seed=2),
    ]
    check(logits, sampling_of(range(4), settings))


def test_sample_reports_logits_that_are_not_finite() -> None:
    logits = _logits(4)
    logits[0, 4999] = np.nan
    logits[1] = -np.inf
    logits[2, 7] = np.inf
    logits[3, 8] = -np.inf
    settings = [SampleSettings(num_logprobs=2), SampleSettings(), SampleSettings(temperature=1.0), SampleSettings()]
    samples = check(logits, sampling_of(range(4), settings))
    assert samples.token_ids.tolist()[:3] == [NOT_FINITE] * 3


def test_sample_reports_that_every_token_is_forbidden() -> None:
    settings = [SampleSettings(restriction=1, temperature=1.0), SampleSettings(restriction=1, num_logprobs=1)]
    assert check(_logits(2), sampling_of(range(2), settings)).token_ids.tolist() == [NONE_ALLOWED] * 2


def test_sample_draws_the_tokens_of_the_reference_for_many_seeds() -> None:
    logits = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), (64, 1))
    sampling = sampling_of(range(64), [SampleSettings(temperature=1.0, seed=seed) for seed in range(64)])
    assert set(check(logits, sampling).token_ids.tolist()) == {0, 1, 2, 3}


def check(logits: NDArray[np.float32], sampling: SamplingArrays) -> Samples:
    """Compare the kernels with the reference, which is returned."""
    positions = 7 * np.arange(len(sampling), dtype=np.int32)
    expected = sample_in_numpy(logits, sampling, positions)
    compare(_sample(torch.from_numpy(logits), sampling, positions, None), expected)
    return expected


def compare(actual: tuple[NDArray[Any], ...], expected: Samples) -> None:
    names = ("token_ids", "logprobs", "top_ids", "top_logprobs", "top_scores")
    for name, ours in zip(names, actual, strict=True):
        reference = getattr(expected, name)
        if name in ABSENT:  # the reference is only as wide as the samples of the batch need
            assert np.all(ours[:, reference.shape[1] :] == ABSENT[name])
            ours = ours[:, : reference.shape[1]]
        np.testing.assert_allclose(ours, reference, atol=5e-6, rtol=1e-6, err_msg=name)


def _sample(
    logits: torch.Tensor, sampling: SamplingArrays, positions: NDArray[np.int32], bias: torch.Tensor | None
) -> tuple[NDArray[Any], ...]:
    names = ("float_params", "int_params", "edit_offsets", "edit_ids", "edit_values")
    arrays = {name: getattr(sampling, name) for name in names} | {"positions": positions}
    inputs: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    outputs = node_launches.sample(
        logits=logits,
        bias=bias,
        edit_rounds=torch.from_numpy(_rounds(sampling)),
        candidates=torch.zeros(NUM_CANDIDATES, dtype=torch.int32),
        **inputs,
    )
    return tuple(output.numpy() for output in outputs)


def _rounds(sampling: SamplingArrays) -> NDArray[np.int32]:
    """Return of each edit the number of earlier edits of the same sample and token."""
    rounds = []
    for first, last in zip(sampling.edit_offsets[:-1], sampling.edit_offsets[1:], strict=True):
        seen: Counter[int] = Counter()
        for token in sampling.edit_ids[first:last].tolist():
            rounds.append(seen[token])
            seen[token] += 1
    return np.array(rounds, np.int32)


def _logits(rows: int, seed: int = 0) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(seed).standard_normal((rows, VOCAB_SIZE), np.float32)
