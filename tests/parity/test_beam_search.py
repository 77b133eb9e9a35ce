"""Beam search without a model compared with transformers' `generate`: equal hypotheses and scores."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.controls.table import EarlyStopping
from antiphon.domain.request import FinishReason
from antiphon.engine.beams.beam_search import BeamSearches, BeamSettings, Hypothesis, Search
from tests.parity.transformers_reference import LogitsOf, Reference, generate

BOS_ID, EOS_ID, VOCAB = 1, 2, 40
ENDS = (FinishReason.STOP, FinishReason.STOP_SEQUENCE)


def model(seed: int, end_bias: float) -> LogitsOf:
    """Return a function from a target to random logits; the probability of the end token varies."""

    def logits_of(target: tuple[int, ...]) -> NDArray[np.float32]:
        dice = np.random.default_rng(zlib.crc32(repr((seed, target)).encode()))
        logits = dice.normal(0.0, 2.0, VOCAB).astype(np.float32)
        logits[EOS_ID] += np.float32(end_bias)
        return logits

    return logits_of


class Driver:
    """Driver that gives candidates to searches of one shape, as the engine does, and stores the beams' tokens."""

    def __init__(self, width: int, num_candidates: int, max_len: int) -> None:
        self.searches = BeamSearches(width, num_candidates, max_len)
        self._num_candidates = num_candidates
        self.histories: dict[Search, list[tuple[int, ...]]] = {}
        self.models: dict[Search, LogitsOf] = {}
        self.streamed: dict[Search, list[int]] = {}
        self.over: dict[Search, list[Hypothesis]] = {}

    def add(self, logits_of: LogitsOf, beam_settings: BeamSettings) -> Search:
        search = self.searches.add(beam_settings)
        self.histories[search] = [(BOS_ID,)] * beam_settings.width
        self.models[search], self.streamed[search] = logits_of, []
        return search

    def step(self) -> None:
        running = list(self.searches.searches)
        found = [self._candidates(search, history) for search in running for history in self.histories[search]]
        ids, scores = (np.stack(column) for column in zip(*found, strict=True))
        # The engine's rows are in any order: here, the last beam of the last search has the first row.
        rows = np.arange(len(ids))[::-1].reshape(len(running), self.searches.width).copy()
        ended = self.searches.advance((ids[::-1].copy(), scores[::-1].copy(), scores[::-1].copy()), rows)
        for search in running:
            before = self.histories[search]
            pairs = zip(*self.searches.moves(search), strict=True)
            self.histories[search] = [(*before[parent], token_id) for parent, token_id in pairs]
        for search, token_ids in self.searches.take_agreed():
            self.streamed[search] += token_ids
        for search in ended:
            assert self.searches.num_streamed(search) == len(self.streamed[search])
            self.over[search] = self.searches.hypotheses(search, search.settings.width)
            self.searches.remove(search)

    def finish(self) -> None:
        while self.searches.searches:
            self.step()

    def _candidates(self, search: Search, history: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        logits = self.models[search](history)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        ids = np.argsort(-logprobs, kind="stable")[: self._num_candidates]
        return ids.astype(np.int64), logprobs[ids]


def words(hypothesis: Hypothesis) -> list[int]:
    """Return a hypothesis's tokens without its end token."""
    return list(hypothesis.token_ids[: len(hypothesis.token_ids) - (hypothesis.finish_reason in ENDS)])


@st.composite
def searches(draw: st.DrawFn, width: int, num_stop_ids: int) -> BeamSettings:
    return BeamSettings(
        width=width,
        max_new_tokens=draw(st.integers(1, 14)),
        eos_id=EOS_ID,
        stop_ids=tuple(range(10, 10 + num_stop_ids)),
        forced_first_id=draw(st.sampled_from([None, None, 7])),
        length_penalty=draw(st.sampled_from([1.0, 0.0, -1.0, 0.6, 2.0])),
        early_stopping=draw(st.sampled_from(EarlyStopping)),
        is_streamed=True,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(2, 8), num_stop_ids=st.integers(0, 2), seed=st.integers(0, 10**6))
def test_beam_search_finds_the_hypotheses_of_transformers(
    data: st.DataObject, width: int, num_stop_ids: int, seed: int
) -> None:
    count = data.draw(st.integers(1, 3))
    driver = Driver(width, width * (2 + num_stop_ids), 14)
    asked = [
        (model(seed + index, data.draw(st.sampled_from([0.0, 3.0, 5.0]))), data.draw(searches(width, num_stop_ids)))
        for index in range(count)
    ]
    started = []
    for logits_of, beam_settings in asked:
        started.append(driver.add(logits_of, beam_settings))
        joins_later: bool = data.draw(st.booleans())
        if driver.searches.searches and joins_later:
            driver.step()  # the next search joins while others run
    driver.finish()
    for search, (logits_of, beam_settings) in zip(started, asked, strict=True):
        expected = generate(
            Reference(logits_of, bos_id=BOS_ID, eos_id=EOS_ID),
            max_new_tokens=beam_settings.max_new_tokens,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=beam_settings.length_penalty,
            early_stopping=beam_settings.early_stopping.value,
            forced_bos_token_id=beam_settings.forced_first_id,
            eos_token_id=[EOS_ID, *beam_settings.stop_ids],
        )
        found = driver.over[search]
        expected = [(ids, score) for ids, score in expected if score is not None and score > -1e6]
        assert [words(one) for one in found] == [ids for ids, _ in expected]
        assert [one.score for one in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert words(found[0])[: len(driver.streamed[search])] == driver.streamed[search]
