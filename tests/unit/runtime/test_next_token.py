"""Scorer of next tokens over a fake model: the feed, the edits, and the runner that is opened once."""

import numpy as np
import pytest
from numpy.typing import NDArray

from antiphon.errors import GraphError
from antiphon.runtime.explain import Edits, NextTokenScorer
from tests.fakes import BOS_ID, FakeRunner, source_of

SOURCE = source_of(target_len=9, length=20)
TARGET = (BOS_ID, *range(4, 24))


class Opening:
    """Opens a fake runner of one row and counts how often. With history, so that every fed token matters."""

    def __init__(self, *, has_encoder: bool = True) -> None:
        self.runner = FakeRunner(max_rows=1, reads_history=True, has_encoder=has_encoder)
        self.count = 0

    def __call__(self) -> FakeRunner:
        self.count += 1
        return self.runner

    def logprobs(self, source: tuple[int, ...], target: tuple[int, ...]) -> NDArray[np.float64]:
        logits = self.runner.logits_after(source, target).astype(np.float64)
        logprobs: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
        return logprobs


@pytest.mark.parametrize("source", [SOURCE, ()], ids=["encoder-decoder", "decoder-only"])
def test_scorer_returns_the_log_probabilities_after_the_whole_target(source: tuple[int, ...]) -> None:
    opening = Opening(has_encoder=bool(source))
    scorer = NextTokenScorer(opening)
    for target in (TARGET[:1], TARGET, TARGET[:5]):
        found = scorer.score(source, target, Edits())
        np.testing.assert_allclose(found.logprobs, opening.logprobs(source, target), atol=1e-6)
        np.testing.assert_array_equal(found.scores, found.logprobs)
    assert opening.runner.encoded == ([[source]] * 3 if source else [])


def test_scorer_applies_the_edits_to_the_scores_only() -> None:
    opening = Opening()
    ids, values = np.array([5, 6], np.int32), np.array([[2.0, 1.0, 0.0], [0.0, 1.0, -np.inf]], np.float32)
    expected = opening.logprobs(SOURCE, TARGET)
    found = NextTokenScorer(opening).score(SOURCE, TARGET, Edits(ids=ids, values=values))
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-6)
    expected[5] += 2.0
    expected[6] = -np.inf
    np.testing.assert_allclose(found.scores, expected, atol=1e-6)


def test_scorer_forbids_tokens_without_an_edit_when_edits_are_exclusive() -> None:
    ids, values = np.array([5, 6], np.int32), np.array([[0.0, 1.0, 0.0]] * 2, np.float32)
    found = NextTokenScorer(Opening()).score(SOURCE, TARGET, Edits(ids=ids, values=values, restriction=1))
    assert np.flatnonzero(found.scores > -np.inf).tolist() == [5, 6]
    assert np.isfinite(found.logprobs[4:]).all()


def test_scorer_opens_its_runner_at_the_first_call_and_once() -> None:
    opening = Opening()
    scorer = NextTokenScorer(opening)
    assert opening.count == 0
    for _ in range(3):
        scorer.score(SOURCE, TARGET, Edits())
    assert opening.count == 1


def test_scorer_refuses_scores_that_are_not_finite() -> None:
    opening = Opening()
    opening.runner.overrides[SOURCE] = np.full(64, np.nan, np.float32)
    with pytest.raises(GraphError, match="not finite"):
        NextTokenScorer(opening).score(SOURCE, TARGET, Edits())
