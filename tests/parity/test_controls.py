"""Every decoding control of the whole engine gives the ids and scores of transformers' `generate`.

All requests of a test run in one batch over native graphs. The reference answers them one by one over logits that
PyTorch computes from the same weights (float32), or that the same graphs compute alone (the shipped int8 model).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import load_bundle
from antiphon.controls.table import EarlyStopping
from antiphon.domain.request import Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.export.bundle_model import NativeStepper
from antiphon.runtime.native import NativeRunner
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import Tokenizer
from tests.fakes import changed, request_of
from tests.marks import marked
from tests.parity.answers_together import (
    answer,
    eager_logits,
    expected,
    export_model,
    lively,
    native_logits,
    shaken,
)
from tests.parity.transformers_reference import LogitsOf

SENTENCES = (
    "How are you?", "He has three dogs.", "Can you help me with this, please?", "Stop!",
    "My sister wants to learn German because she likes the language.",
    "We were very tired after the long journey, so we went to bed early.",
)  # fmt: skip
MARIAN = ModelConfig(
    vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=64, dropout=0.0,
    max_source_len=24, max_target_len=40,
)  # fmt: skip
T5 = ModelConfig(
    vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=64, dropout=0.0,
    max_source_len=24, max_target_len=40, norm="rmsnorm", norm_placement="pre", activation="gelu_tanh", gated=True,
    positions="t5_relative", bias=False, tie_output=False, scale_embeddings=False, attention_scale=1.0, head_dim=12,
)  # fmt: skip
FAMILIES = {"marian": (MARIAN, 2), "t5": (T5, 8)}  # seeds with outputs that end early, late and never
LENGTH_PENALTIES = (1.0, 0.0, 2.0, -1.0, 0.6)
# Two float32 implementations of one model differ by up to 1e-5 in a logit, so closer logits count as equal.
SHAKE = 2e-5

Controls = dict[str, Any]
"""Arguments of SamplingParams, and prefix_ids."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """Model, its runner, and sources with the reference's logits for each."""

    config: ModelConfig
    runner: NativeRunner
    sources: dict[tuple[int, ...], LogitsOf]


@pytest.fixture(scope="module", params=marked(FAMILIES, "combinations", but=["t5"]))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    config, seed = FAMILIES[request.param]
    model, dice = lively(config, seed), random.Random(1)
    runner = NativeRunner(export_model(tmp_path_factory.mktemp(request.param), model), max_rows=800, threads=1)
    sources = [tuple(dice.randrange(4, 61) for _ in range(dice.randint(3, 20))) for _ in range(10)]
    return Served(config=config, runner=runner, sources={source: eager_logits(model, source) for source in sources})


@pytest.fixture(scope="module")
def shipped() -> Served:
    bundle = load_bundle(SHIPPED_BUNDLE)
    config, tokenizer = bundle.manifest.model, Tokenizer.load(bundle.file("tokenizer.json"))
    stepper = NativeStepper(bundle.path, bundle.graph_set("int8", "native"), config, threads=1)
    sources = [(*tokenizer.encode(sentence), tokenizer.eos_id) for sentence in SENTENCES]
    runner = NativeRunner(bundle, max_rows=500, threads=1, num_blocks=4000)
    logits = {source: native_logits(stepper, config, source) for source in sources}
    return Served(config=config, runner=runner, sources=logits)


def requests_of(served: Served, asked: Sequence[Controls]) -> list[Request]:
    """Return one request for each source in turn; greedy ones with log-probabilities."""
    sources = list(served.sources)
    requests: list[Request] = []
    for index, controls in enumerate(asked):
        prefix = controls.get("prefix_ids", ())
        rest = {name: value for name, value in controls.items() if name not in ("prefix_ids", "candidate_ids")}
        params = SamplingParams(**{"max_new_tokens": 20} | rest)
        if params.beam_width == 1:
            params = dataclasses.replace(params, num_logprobs=0)
        made = request_of(str(index), sources[index % len(sources)], params=params, prefix=prefix)
        candidates = controls.get("candidate_ids")
        requests.append(made if candidates is None else changed(made, candidate_ids=np.array(candidates, np.int32)))
    return requests


def among(logits_of: LogitsOf, candidate_ids: NDArray[np.int32] | None) -> LogitsOf:
    """Return the logits of a model whose vocabulary is the candidates."""
    if candidate_ids is None:
        return logits_of

    def logits(target: tuple[int, ...]) -> NDArray[np.float32]:
        own = logits_of(target)
        masked = np.full_like(own, -np.inf)
        masked[candidate_ids] = own[candidate_ids]
        return masked

    return logits


def check(served: Served, asked: Sequence[Controls]) -> list[tuple[int, ...]]:
    """Compare the answers of requests that run in one batch with the reference. Return the first output of each.

    A difference is an error unless the reference also changes its answer when its logits are perturbed. At most one
    request in fifty may depend on such a near tie (of about 1,300 requests none did when this test was written).
    """
    requests, num_ties = requests_of(served, asked), 0
    answers = answer(served.runner, requests)
    for request in requests:
        logits_of = among(served.sources[request.source_ids], request.candidate_ids)
        events = answers[request.request_id]
        found = [event for event in events if event.score is not None]
        outputs = expected(logits_of, request, served.config)
        if [list(event.token_ids) for event in found] == [ids for ids, _ in outputs]:
            check_scores(found, [score for _, score in outputs], request, logits_of)
            continue
        moved = [expected(shaken(logits_of, amount), request, served.config) for amount in (SHAKE, -SHAKE)]
        assert any([ids for ids, _ in outputs] != [ids for ids, _ in other] for other in moved), (request, outputs)
        num_ties += 1
    assert num_ties <= len(requests) / 50
    return [answers[request.request_id][0].token_ids for request in requests]


def check_scores(
    found: Sequence[TokenEvent], scores: Sequence[float | None], request: Request, logits_of: LogitsOf
) -> None:
    """Compare scores of hypotheses (within 1e-4, or some float32 steps if large) and log-probabilities of the others.

    A length penalty below 0 multiplies a sum, and its error, by a power of the length.
    """
    params = request.params
    if params.beam_width > 1:
        most = 1e-4 * max(1.0, (params.max_new_tokens or 1) ** -params.length_penalty)
        assert [event.score for event in found] == pytest.approx(scores, abs=most, rel=1e-6), request
        return
    (event,) = found
    target = (1, *request.prefix_ids)
    for one in event.logprobs:
        logits = logits_of(target).astype(np.float64)
        assert one.logprob == pytest.approx(logits[one.token_id] - np.logaddexp.reduce(logits), abs=1e-4), request
        target = (*target, one.token_id)


def searches() -> list[Controls]:
    """Return beam searches of every width, stopping rule and length penalty; n-best and limits in turn."""
    shapes = [(w, e, p) for w in range(2, 9) for e in EarlyStopping for p in LENGTH_PENALTIES]
    return [
        dict(
            beam_width=width,
            early_stopping=early_stopping,
            length_penalty=penalty,
            num_return_sequences=1 + index % width,
            max_new_tokens=(20, 9, 35, 1)[index % 4],
        )
        for index, (width, early_stopping, penalty) in enumerate(shapes)
    ]


def each_alone(plain: tuple[int, ...], config: ModelConfig) -> list[Controls]:
    """Return every single control. Its ids come from the answer without controls, so that each changes the answer."""
    ids = plain or (7, 33, 12)
    return [
        dict(logit_bias=tuple((dict.fromkeys(ids[::2], -4.0) | {config.eos_id: 1.0, 30: 2.0}).items())),
        dict(repetition_penalty=1.6),
        dict(repetition_penalty=0.8),
        dict(no_repeat_ngram_size=1),
        dict(no_repeat_ngram_size=2),
        dict(no_repeat_ngram_size=3),
        dict(min_new_tokens=16),
        dict(suppressed_ids=ids[::3]),
        dict(forced_first_id=ids[-1]),
        dict(allowed_ids=tuple({*ids[1:], *range(5, config.vocab_size, config.vocab_size // 15)})),
        dict(stop_ids=tuple({*ids[len(ids) // 2 :]})),
        dict(ignore_eos=True),
        dict(presence_penalty=2.5),
        dict(frequency_penalty=1.5),
        dict(prefix_ids=(*ids[1:3], 40)),
    ]  # fmt: skip


def some_together(dice: random.Random, choices: Sequence[Controls]) -> Controls:
    """Return several controls together, with beams or without."""
    chosen: Controls = {}
    for controls in dice.sample(choices, dice.randint(2, 5)):
        chosen |= controls
    if "forced_first_id" in chosen and {"prefix_ids", "allowed_ids", "suppressed_ids"} & chosen.keys():
        del chosen["forced_first_id"]  # transformers forces no token after a prefix; the others can exclude it
    if "allowed_ids" in chosen and chosen.get("no_repeat_ngram_size") == 1:
        del chosen["allowed_ids"]  # no token would be left after a few steps
    if (width := dice.randint(1, 6)) > 1:
        chosen |= dict(beam_width=width, num_return_sequences=dice.randint(1, width))
        chosen |= dict(length_penalty=dice.choice(LENGTH_PENALTIES), early_stopping=dice.choice(list(EarlyStopping)))
    return chosen


def test_greedy_and_beam_search_give_the_outputs_of_transformers(family: Served) -> None:
    count = len(family.sources)
    answers = check(family, [{}] * count + searches())
    assert len({len(token_ids) for token_ids in answers[:count]}) > 3  # some end soon, some late
    assert len({token_id for token_ids in answers for token_id in token_ids}) > 20


def test_every_single_control_gives_the_outputs_of_transformers(family: Served) -> None:
    plain = check(family, [{}] * len(family.sources))
    kinds = list(zip(*(each_alone(ids, family.config) for ids in plain), strict=True))
    answers = check(family, [controls for kind in kinds for controls in kind])
    for index, kind in enumerate(kinds):
        assert answers[index * len(plain) : (index + 1) * len(plain)] != plain, f"{kind[0]} changed nothing"
    beams: Controls = dict(beam_width=3, num_return_sequences=2)
    check(family, [controls | beams for kind in kinds for controls in kind])


def test_every_control_among_candidates_gives_the_outputs_of_transformers(family: Served) -> None:
    """Each request has candidates of its own; requests without candidates are in the same batch."""
    dice = random.Random(6)
    plain = check(family, [{}] * len(family.sources))
    asked: list[Controls] = []
    for ids in plain:
        for controls in (*each_alone(ids, family.config), *dice.sample(searches(), 6)):
            needed = {family.config.eos_id, controls.get("forced_first_id", 7)}
            candidates = sorted({*dice.sample(range(3, family.config.vocab_size), dice.randint(12, 40)), *needed})
            if "allowed_ids" not in controls:
                asked.append(controls | dict(candidate_ids=candidates))
    answers = check(family, asked)
    for controls, token_ids in zip(asked, answers, strict=True):
        assert set(token_ids) <= {*controls["candidate_ids"]}
    check(family, [*asked, *[{}] * len(plain)])


@pytest.mark.combinations
def test_several_controls_give_the_outputs_of_transformers(family: Served) -> None:
    dice = random.Random(4)
    plain = check(family, [{}] * len(family.sources))
    check(family, [some_together(dice, each_alone(ids, family.config)) for _ in range(12) for ids in plain])


def test_search_whose_forced_token_stops_it_has_an_empty_output(family: Served) -> None:
    """Regression: the stop id was streamed when max_new_tokens was 1."""
    stopped: Controls = dict(beam_width=3, forced_first_id=17, stop_ids=(17, 28))
    assert check(family, [stopped | dict(max_new_tokens=count) for count in (1, 2, 5)]) == [()] * 3


def test_search_with_more_candidates_than_tokens_gives_the_outputs_of_transformers(family: Served) -> None:
    stop_ids = tuple(range(20, 28))  # 8 beams consider 8 * (2 + 8) continuations each, of 61 tokens
    check(family, [dict(beam_width=8, stop_ids=stop_ids, num_return_sequences=8), {}])


def test_logits_are_perturbed_in_both_directions(family: Served) -> None:
    for logits_of in family.sources.values():
        plain, up, down = (shaken(logits_of, amount)((1, 7)) for amount in (0.0, SHAKE, -SHAKE))
        assert up + down == pytest.approx(2 * plain, abs=SHAKE / 2)
        assert SHAKE / 2 < np.abs(up - plain).max() < 2 * SHAKE


def test_searches_of_the_shipped_model_give_the_outputs_of_transformers(shipped: Served) -> None:
    shapes = [(width, penalty) for width in (2, 4, 8) for penalty in (0.0, 1.0, 2.0)]
    asked = [dict(beam_width=w, length_penalty=p, num_return_sequences=w) for w, p in shapes for _ in shipped.sources]
    check(shipped, [{}] * len(shipped.sources) + asked)


def test_every_control_of_the_shipped_model_gives_the_outputs_of_transformers(shipped: Served) -> None:
    plain = check(shipped, [{}] * len(shipped.sources))
    kinds = list(zip(*(each_alone(ids, shipped.config) for ids in plain), strict=True))
    # Its graphs return only log-probabilities, and a repetition penalty depends on the sign of the logits.
    greedy = [controls for kind in kinds for controls in kind if "repetition_penalty" not in controls]
    beams: Controls = dict(beam_width=4, num_return_sequences=2)
    check(shipped, greedy + [controls | beams for kind in kinds for controls in kind])
