"""Penalties and constraints, compared with transformers' logits processors inside its own greedy `generate`."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.logits_processors import LogitsProcessors
from antiphon.ops.sampling import sample
from tests.batches import SampleSettings, sampling_of
from tests.parity.transformers_reference import LogitsOf, Reference, generate

BOS_ID, EOS_ID, VOCAB = 1, 2, 24
IDS = st.integers(3, VOCAB - 1)


def model(seed: int) -> LogitsOf:
    """Return logits in which few tokens are likely and repeat, so that penalties have an effect."""

    def logits_of(target: tuple[int, ...]) -> NDArray[np.float32]:
        dice = np.random.default_rng(zlib.crc32(repr((seed, target[-2:])).encode()))
        logits = dice.normal(0.0, 1.0, VOCAB).astype(np.float32)
        logits[:8] += np.float32(2.0)
        return logits

    return logits_of


def _choice(edits: LogitsProcessors) -> SampleSettings:
    ids, values = edits.current()
    edited = [(token_id, *row) for token_id, row in zip(ids.tolist(), values.tolist(), strict=True)]
    return SampleSettings(restriction=edits.restriction, edits=edited)


def greedy(logits_of: LogitsOf, params: SamplingParams, prefix: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """Generate greedily with the logits processors of params. Return the tokens without the end token."""
    target = (BOS_ID, *prefix)
    edits = LogitsProcessors.of(params, target, EOS_ID)
    for _ in range(max_new_tokens):
        sampling = sampling_of([0], [SampleSettings() if edits is None else _choice(edits)])
        token_id = int(sample(logits_of(target)[None], sampling, np.zeros(1, np.int32)).token_ids[0])
        if token_id in (EOS_ID, *params.stop_ids):
            break
        target = (*target, token_id)
        if edits is not None:
            edits.push(token_id)
            edits = edits.fork()  # a fork continues like the original
    return list(target[1 + len(prefix) :])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    prefix=st.lists(IDS, max_size=4).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.3, 3.0, 0.7]),
    no_repeat_ngram_size=st.integers(0, 3),
    min_new_tokens=st.integers(0, 12),
    suppressed_ids=st.lists(IDS, max_size=3).map(tuple),
    bias=st.dictionaries(IDS, st.sampled_from([-3.0, 1.5, 4.0]), max_size=3),
    stop_ids=st.lists(IDS, max_size=2, unique=True).map(tuple),
)
def test_logits_processors_choose_the_tokens_of_transformers(
    seed: int,
    prefix: tuple[int, ...],
    repetition_penalty: float,
    no_repeat_ngram_size: int,
    min_new_tokens: int,
    suppressed_ids: tuple[int, ...],
    bias: dict[int, float],
    stop_ids: tuple[int, ...],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        min_new_tokens=min_new_tokens,
        suppressed_ids=suppressed_ids,
        logit_bias=tuple(bias.items()),
        stop_ids=stop_ids,
        max_new_tokens=12,
    )
    reference = Reference(model(seed), bos_id=BOS_ID, eos_id=EOS_ID)
    ((expected, _),) = generate(
        reference,
        prefix=prefix,
        max_new_tokens=12,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        min_new_tokens=min_new_tokens,
        suppress_tokens=list(suppressed_ids) or None,
        sequence_bias={(token_id,): value for token_id, value in bias.items()} or None,
        eos_token_id=[EOS_ID, *stop_ids],
    )
    assert greedy(model(seed), params, prefix, 12) == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), allowed=st.lists(IDS, min_size=1, max_size=6, unique=True), ngram=st.integers(0, 2))
def test_allowed_ids_choose_the_tokens_of_the_prefix_constraint_of_transformers(
    seed: int, allowed: list[int], ngram: int
) -> None:
    params = SamplingParams(allowed_ids=tuple(allowed), repetition_penalty=1.2, no_repeat_ngram_size=ngram)
    permits: Callable[[int, object], list[int]] = lambda batch_id, target: [*allowed, EOS_ID]  # noqa: E731
    made = Reference(model(seed), bos_id=BOS_ID, eos_id=EOS_ID)
    ((expected, _),) = generate(
        made, max_new_tokens=10, repetition_penalty=1.2, no_repeat_ngram_size=ngram, permits=permits
    )
    assert greedy(model(seed), params, (), 10) == expected


@given(
    seed=st.integers(0, 10**6),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
)
def test_presence_and_frequency_penalties_follow_their_formula(seed: int, presence: float, frequency: float) -> None:
    logits_of = model(seed)
    target: tuple[int, ...] = (BOS_ID, 5)
    for _ in range(8):
        logits = logits_of(target).astype(np.float64)
        for token_id in set(target[2:]):
            logits[token_id] -= presence + frequency * target[2:].count(token_id)
        target = (*target, int(logits.argmax()))
        if target[-1] == EOS_ID:
            break
    expected = [token_id for token_id in target[2:] if token_id != EOS_ID]
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    assert greedy(logits_of, params, (5,), 8) == expected
