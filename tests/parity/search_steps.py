"""Reported steps of a beam search: their replay, and their comparison with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from antiphon.domain.request import Beam, BeamStep
from tests.parity.transformers_reference import LogitsOf, Reference, search


@dataclass(frozen=True, slots=True)
class Path:
    """Target that a search has reached: its tokens, the beam that each of them continues, and its last beam."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    beam: Beam

    def continued(self, beam: Beam) -> Path:
        """Return the path of a beam that continues this one."""
        return Path((*self.token_ids, beam.token_id), (*self.parents, beam.parent), beam)


ROOT = Path((), (), Beam(parent=0, token_id=0, total_logprob=0.0))


@dataclass(frozen=True, slots=True)
class Replay:
    """Paths of a search: live ones after each step, and all finished ones in order."""

    live: tuple[tuple[Path, ...], ...]
    finished: tuple[Path, ...]

    def best(self, count: int) -> list[Path]:
        """Return the finished hypotheses with the highest scores; of equal ones, those that were found first."""
        return sorted(self.finished, key=_minus_score)[:count]


def replay(steps: Sequence[BeamStep]) -> Replay:
    """Follow the parents of every reported beam."""
    live: list[tuple[Path, ...]] = [(ROOT,)]
    finished: list[Path] = []
    for step in steps:
        finished += [live[-1][beam.parent].continued(beam) for beam in step.finished]
        live.append(tuple(live[-1][beam.parent].continued(beam) for beam in step.live))
    return Replay(tuple(live[1:]), tuple(finished))


def check_steps(steps: Sequence[BeamStep], logits_of: LogitsOf, ids: tuple[int, int], **options: Any) -> None:
    """Compare reported steps with a search of transformers over the same logits.

    ids: of the begin and the end token. options: of `transformers_reference.search`.
    Compares number of steps, live beams and their order, every addition to a score, parents, tokens and scores.
    """
    fed: list[tuple[int, ...]] = []
    bos_id, eos_id = ids
    made = search(Reference(_recording(logits_of, fed), bos_id=bos_id, eos_id=eos_id), **options)
    given, width = (bos_id, *options.get("prefix", ())), options["num_beams"]
    found = replay(steps)
    assert len(steps) == len(made.scores)
    before: tuple[Path, ...] = (ROOT,)
    for index, step in enumerate(steps):
        for beam in (*step.live, *step.finished):
            added = beam.total_logprob - before[beam.parent].beam.total_logprob
            assert added == pytest.approx(float(made.scores[index][beam.parent, beam.token_id]), abs=1e-4)
        before = found.live[index]
        totals = [path.beam.total_logprob for path in before]
        assert totals == sorted(totals, reverse=True)
        rows = fed[(index + 1) * width : (index + 2) * width]  # of the next step; none after the last one
        assert not rows or [(*given, *path.token_ids) for path in before] == rows[: len(before)]
    _check_hypotheses(found, made, len(given))


def _check_hypotheses(found: Replay, made: Any, num_given: int) -> None:
    """Compare parents, tokens and scores. transformers also returns beams without a text, with a very low score."""
    scores = [score for score in made.sequences_scores.tolist() if score > -1e6]
    best = found.best(len(scores))
    assert [path.beam.score for path in best] == pytest.approx(scores, abs=1e-4)
    for path, row, parents in zip(best, made.sequences.tolist(), made.beam_indices.tolist(), strict=False):
        length = len(path.token_ids)
        assert path.token_ids == tuple(row[num_given : num_given + length])
        assert path.parents == tuple(parent for parent in parents if parent >= 0)


def _recording(logits_of: LogitsOf, fed: list[tuple[int, ...]]) -> Callable[[tuple[int, ...]], Any]:
    def recorded(target: tuple[int, ...]) -> Any:
        fed.append(target)
        return logits_of(target)

    return recorded


def _minus_score(path: Path) -> float:
    assert path.beam.score is not None
    return -path.beam.score
