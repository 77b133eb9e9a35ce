"""Frequencies of the engine's sampled tokens compared with the probabilities of transformers; and their seeds.

The vocabulary of the model is so small that every token, and most pairs of tokens, are sampled often enough.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from antiphon.architecture.config import ModelConfig
from antiphon.domain.request import Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.sampling import FLOAT_PARAMS
from antiphon.runtime.native import NativeRunner
from antiphon.transformer.random_model import random_transformer
from tests.fakes import request_of
from tests.parity.answers_together import answer, eager_logits, export_model, processor_options
from tests.parity.transformers_reference import LogitsOf, Reference, next_scores

CONFIG = ModelConfig(
    vocab_size=14, d_model=32, encoder_layers=1, decoder_layers=2, num_heads=2, d_ff=64, dropout=0.0,
    max_source_len=16, max_target_len=16,
)  # fmt: skip
SOURCE = (5, 11, 4, 9, 13, 6)
PREFIX = (7, 10, 7)
NUM_SEEDS, NUM_SAMPLES = 100, 24  # 2,400 outputs: each seed's own and those derived from it
COMBINATIONS: dict[str, dict[str, Any]] = {
    "nothing": dict(),
    "hot": dict(temperature=2.5),
    "cold": dict(temperature=0.6),
    "top_k": dict(temperature=1.5, top_k=5),
    "top_p": dict(temperature=1.3, top_p=0.8),
    "min_p": dict(temperature=1.5, min_p=0.1),
    "typical_p": dict(temperature=1.2, typical_p=0.7),
    "all_warpers": dict(temperature=1.8, top_k=9, top_p=0.95, min_p=0.02, typical_p=0.9),
    "penalties": dict(temperature=1.6, repetition_penalty=1.7, logit_bias=((6, 1.5), (8, -1.0))),
    "constraints": dict(temperature=1.6, no_repeat_ngram_size=1, min_new_tokens=2, suppressed_ids=(4, 12)),
    "everything": dict(
        temperature=1.4, top_k=8, top_p=0.9, min_p=0.01, typical_p=0.95, repetition_penalty=1.3, min_new_tokens=1
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Runner of the model, and the logits of PyTorch."""

    runner: NativeRunner
    logits_of: LogitsOf


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = random_transformer(CONFIG, seed=4)
    bundle = export_model(tmp_path_factory.mktemp("sampling"), model)
    runner = NativeRunner(bundle, max_rows=NUM_SEEDS * NUM_SAMPLES, threads=1)
    return Served(runner, eager_logits(model, SOURCE))


def requests_of(params: SamplingParams, prefix: tuple[int, ...]) -> list[Request]:
    """Return a request with many samples for each seed."""
    shared = dataclasses.replace(params, num_return_sequences=NUM_SAMPLES, max_new_tokens=2, num_logprobs=0)
    return [
        request_of(str(seed), SOURCE, params=dataclasses.replace(shared, seed=seed), prefix=prefix)
        for seed in range(NUM_SEEDS)
    ]


def produced(event: TokenEvent) -> tuple[int, ...]:
    """Return the tokens of an output, the end token included."""
    return tuple(one.token_id for one in event.logprobs)


def drawn(served: Served, params: SamplingParams, prefix: tuple[int, ...]) -> Counter[tuple[int, ...]]:
    """Count each output of at most two tokens."""
    answers = answer(served.runner, requests_of(params, prefix))
    return Counter(produced(event) for events in answers.values() for event in events)


def distribution(logits_of: LogitsOf, params: SamplingParams, prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the probability of each output of at most two tokens in transformers."""
    first = probabilities(logits_of, params, prefix, 0)
    second = {token_id: probabilities(logits_of, params, (*prefix, token_id), 1) for token_id in first}
    return {(one,): share for one, share in first.items() if one == CONFIG.eos_id} | {
        (one, two): share * further
        for one, share in first.items()
        if one != CONFIG.eos_id
        for two, further in second[one].items()
    }


def probabilities(
    logits_of: LogitsOf, params: SamplingParams, target: tuple[int, ...], num_produced: int
) -> dict[int, float]:
    """Return the probability of each token that transformers can sample after a target."""
    # Generated tokens are passed to transformers as a prefix, which does not count towards min_new_tokens.
    left = dataclasses.replace(params, min_new_tokens=max(0, params.min_new_tokens - num_produced))
    warpers = {name: getattr(params, name) for name in ("top_k", *FLOAT_PARAMS)}
    reference = Reference(logits_of, bos_id=CONFIG.bos_id, eos_id=CONFIG.eos_id)
    scores = next_scores(reference, target, **warpers, **processor_options(left, CONFIG)).double()
    return {token_id: share for token_id, share in enumerate(scores.softmax(dim=-1).tolist()) if share > 0}


def p_value(counts: Mapping[Any, float], shares: Mapping[Any, float]) -> float:
    """Return the p-value of the counts by Pearson's chi-square test.

    Cells with an expected count below five are merged into one.
    """
    total = sum(counts.values())
    cells = [(counts.get(key, 0), share * total) for key, share in shares.items() if share * total >= 5]
    rare = [(counts.get(key, 0), share * total) for key, share in shares.items() if share * total < 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    assert len(cells) > 2  # otherwise the test would have little power
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = torch.tensor(len(cells) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2, dtype=torch.float64)))


def firsts(of_outputs: Mapping[tuple[int, ...], float]) -> dict[int, float]:
    """Sum counts or probabilities by first token."""
    result: dict[int, float] = {}
    for output, amount in of_outputs.items():
        result[output[0]] = result.get(output[0], 0) + amount
    return result


@pytest.mark.parametrize("prefix", [(), PREFIX], ids=["from_the_start", "after_a_prefix"])
@pytest.mark.parametrize("name", list(COMBINATIONS))
def test_token_frequencies_follow_the_probabilities_of_transformers(
    served: Served, name: str, prefix: tuple[int, ...]
) -> None:
    params = SamplingParams(**{"temperature": 1.0} | COMBINATIONS[name])
    counts, shares = drawn(served, params, prefix), distribution(served.logits_of, params, prefix)
    assert set(counts) <= set(shares)  # outputs with probability 0 in transformers never occur
    for seen, expected in ((counts, shares), (firsts(counts), firsts(shares))):
        assert p_value(seen, expected) > 1e-4


@pytest.mark.parametrize(
    "other", [dict(temperature=1.15), dict(top_p=0.95), dict(repetition_penalty=1.2), dict(logit_bias=((12, 0.25),))]
)
def test_counts_suffice_to_detect_another_distribution(served: Served, other: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0)
    counts = drawn(served, dataclasses.replace(params, **other), PREFIX)
    assert p_value(counts, distribution(served.logits_of, params, PREFIX)) < 1e-4


Outputs = dict[str, list[tuple[Any, ...]]]


def outputs(served: Served, requests: list[Request]) -> Outputs:
    """Return tokens, log-probabilities and score of every output, by request."""
    return {
        name: [(event.token_ids, event.logprobs, event.score, event.finish_reason) for event in events]
        for name, events in answer(served.runner, requests).items()
    }


def crowd() -> list[Request]:
    dice = random.Random(0)
    requests: list[Request] = []
    for index in range(80):
        controls: dict[str, Any] = dict(temperature=1.0) | dice.choice(list(COMBINATIONS.values()))
        params = SamplingParams(
            **controls, seed=dice.randrange(2**64), num_return_sequences=dice.randint(1, 4), num_logprobs=2
        )
        source = tuple(dice.randrange(4, CONFIG.vocab_size) for _ in range(dice.randint(1, 16)))
        requests.append(request_of(str(index), source, params=params, prefix=dice.choice([(), PREFIX])))
    return requests


def test_a_seed_gives_the_same_outputs_alone_in_a_crowd_and_in_another_order(served: Served) -> None:
    requests = crowd()
    together = outputs(served, requests)
    assert outputs(served, requests[::-1]) == together
    for request in requests:
        assert outputs(served, [request]) == {request.request_id: together[request.request_id]}


def test_other_seeds_give_other_outputs(served: Served) -> None:
    params = SamplingParams(temperature=1.0, num_return_sequences=4, num_logprobs=0)
    found = outputs(
        served,
        [request_of(str(seed), SOURCE, params=dataclasses.replace(params, seed=seed)) for seed in range(50)],
    )
    assert len({one[0] for outputs_of_one in found.values() for one in outputs_of_one}) > 100
