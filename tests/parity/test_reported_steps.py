"""Reported steps of beam searches over native graphs: those of transformers, with totals that Score confirms.

The reference searches over logits that PyTorch computes from the same weights, in float32.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from antiphon.controls.table import EarlyStopping
from antiphon.domain.request import Request
from antiphon.domain.sampling_params import SamplingParams
from antiphon.runtime.native import NativeRunner
from antiphon.transformer.transformer import Transformer
from tests.fakes import request_of, scored
from tests.parity.answers_together import answer, eager_logits, export_model, lively
from tests.parity.search_steps import Path, Replay, check_steps, replay
from tests.parity.test_controls import MARIAN

SEARCHES = [
    SamplingParams(beam_width=2, max_new_tokens=9, num_return_sequences=2),
    SamplingParams(beam_width=4, max_new_tokens=12, num_return_sequences=3, length_penalty=0.6),
    SamplingParams(beam_width=5, max_new_tokens=12, early_stopping=EarlyStopping.FIRST),
    SamplingParams(beam_width=3, max_new_tokens=20, early_stopping=EarlyStopping.NEVER, length_penalty=2.0),
    SamplingParams(beam_width=8, max_new_tokens=1, num_return_sequences=8),
]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A random model, and its native graphs."""

    model: Transformer
    runner: NativeRunner


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    model = lively(MARIAN, seed=2)
    bundle = export_model(tmp_path_factory.mktemp("tiny"), model)
    return Tiny(model=model, runner=NativeRunner(bundle, max_rows=800, threads=1))


def requests() -> list[Request]:
    """Return every search over several sources."""
    dice = random.Random(1)
    sources = [tuple(dice.randrange(4, 61) for _ in range(dice.randint(3, 20))) for _ in range(6)]
    asked = [(source, params) for source in sources for params in SEARCHES]
    return [
        dataclasses.replace(request_of(str(index), source, params=params), reports_beam_steps=True)
        for index, (source, params) in enumerate(asked)
    ]


def test_steps_over_native_graphs_are_those_of_transformers(tiny: Tiny) -> None:
    asked = requests()
    answers = answer(tiny.runner, asked)
    for request in asked:
        params, events = request.params, answers[request.request_id]
        steps = events[-1].beam_steps
        check_steps(
            steps,
            eager_logits(tiny.model, request.source_ids),
            (MARIAN.bos_id, MARIAN.eos_id),
            max_new_tokens=params.max_new_tokens,
            num_beams=params.beam_width,
            num_return_sequences=params.num_return_sequences,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping.value,
        )
        best = replay(steps).best(params.num_return_sequences)
        assert [path.beam.score for path in best] == [event.score for event in events]


def test_totals_of_beams_are_sums_of_the_log_probabilities_of_score(tiny: Tiny) -> None:
    asked = requests()[: len(SEARCHES)]
    answers = answer(tiny.runner, asked)
    for request in asked:
        found = replay(answers[request.request_id][-1].beam_steps)
        paths = [path for paths in _all(found) for path in paths]
        scores: list[Request] = [scored(request, path.token_ids, name=str(i)) for i, path in enumerate(paths)]
        judged = answer(tiny.runner, scores)
        for name, path in enumerate(paths):
            (event,) = judged[str(name)]
            logprobs = [one.logprob for one in event.logprobs]
            assert path.beam.total_logprob == pytest.approx(sum(logprobs), abs=1e-4)
            assert [one.token_id for one in event.logprobs] == list(path.token_ids)


def _all(found: Replay) -> Iterator[tuple[Path, ...]]:
    """Yield the live beams of each step, then the finished hypotheses."""
    yield from found.live
    yield found.finished
