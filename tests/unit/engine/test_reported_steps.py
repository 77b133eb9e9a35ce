"""Steps of beam searches that requests ask for: equal to transformers' search over the same logits, and without effect.

The fake model's logits depend on the whole target.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.domain.request import FinishReason, Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.sequences.sequence import SequenceGroup
from tests.fakes import BOS_ID, EOS_ID, request_of, source_of
from tests.parity.search_steps import check_steps, replay
from tests.unit.engine.step_bench import Bench
from tests.unit.engine.test_searches import beam_requests, logits_of, search_options

ENDS = (FinishReason.STOP, FinishReason.STOP_SEQUENCE)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop, max_rows=8, num_blocks=200, reads_history=True)


def asking(bench: Bench, name: str, params: SamplingParams, *, target_len: int = 9) -> Request:
    request = request_of(name, source_of(target_len=target_len), params=params, arrival_s=bench.clock())
    return dataclasses.replace(request, reports_beam_steps=True)


def last_of(events: tuple[TokenEvent, ...]) -> TokenEvent:
    (last,) = [event for event in events if event.is_last]
    assert not any(event.beam_steps for event in events if event is not last)
    return last


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_steps_of_searches_in_a_crowd_are_those_of_transformers_alone(
    loop: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True)
    asked = []
    for index in range(data.draw(st.integers(1, 6))):
        request, reports = data.draw(beam_requests(str(index))), data.draw(st.booleans()) or index == 0
        asked.append(bench.ask(dataclasses.replace(request, reports_beam_steps=reports)))
        for _ in range(data.draw(st.integers(0, 2))):
            bench.step()
    bench.finish()
    for group in asked:
        events = bench.outputs(group)
        steps = last_of(events).beam_steps
        if not group.request.reports_beam_steps:
            assert steps == ()
            continue
        check_steps(steps, logits_of(bench, group.request), (BOS_ID, EOS_ID), **search_options(bench, group.request))
        check_outputs(group, events)


def check_outputs(group: SequenceGroup, events: tuple[TokenEvent, ...]) -> None:
    """Check that the best hypotheses of the reported steps are the outputs, with exactly the same scores."""
    outputs = [event for event in events if event.score is not None]
    best = replay(last_of(events).beam_steps).best(group.request.params.num_return_sequences)
    found = [
        path.token_ids[: len(path.token_ids) - (event.finish_reason in ENDS)]
        for path, event in zip(best, outputs, strict=True)
    ]
    assert found == [event.token_ids for event in outputs]
    assert [path.beam.score for path in best] == [event.score for event in outputs]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_reporting_steps_changes_no_other_result(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    asked = [data.draw(beam_requests(str(index))) for index in range(4)]
    results = []
    for reports in (False, True):
        bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True)
        groups = [bench.ask(dataclasses.replace(one, reports_beam_steps=reports)) for one in asked]
        bench.finish()
        events = [event for group in groups for event in bench.outputs(group)]
        assert any(event.beam_steps for event in events) == reports
        results.append([dataclasses.replace(event, beam_steps=()) for event in events])
    assert results[0] == results[1]


def test_beams_without_a_text_are_not_reported(bench: Bench) -> None:
    """A forced token leaves one beam after the first step, because all beams would have the same text."""
    params = SamplingParams(beam_width=4, forced_first_id=9, max_new_tokens=3, ignore_eos=True)
    group = bench.ask(asking(bench, "a", params))
    bench.finish()
    first, second, third = last_of(bench.outputs(group)).beam_steps
    assert [(beam.parent, beam.token_id, beam.total_logprob) for beam in first.live] == [(0, 9, 0.0)]
    assert [beam.parent for beam in second.live] == [0, 0, 0, 0]
    assert third.live == ()
    assert len(third.finished) == 4


def test_search_that_reaches_its_time_limit_reports_the_steps_so_far(bench: Bench) -> None:
    params = SamplingParams(beam_width=3, num_return_sequences=3, time_limit_s=5.0, ignore_eos=True, length_penalty=0.5)
    group = bench.ask(asking(bench, "a", params, target_len=25))
    for _ in range(4):
        bench.step()
    bench.clock.advance(6.0)
    bench.step()
    events = bench.outputs(group)
    found = replay(last_of(events).beam_steps)
    assert len(found.live) == 4
    assert [path.token_ids for path in found.live[-1]] == [event.token_ids for event in events]
    for path, event in zip(found.live[-1], events, strict=True):
        assert event.score == path.beam.total_logprob / 4**0.5


def test_cancelled_searches_and_those_that_never_started_report_no_steps(bench: Bench) -> None:
    params = SamplingParams(beam_width=4, time_limit_s=5.0, ignore_eos=True)
    running, waiting = (
        bench.ask(asking(bench, "running", params)),
        [bench.ask(asking(bench, str(i), params)) for i in range(5)],
    )
    bench.step()
    bench.step("running")
    bench.clock.advance(6.0)
    bench.finish()
    for group, reason in ((running, FinishReason.CANCELLED), (waiting[-1], FinishReason.TIME_LIMIT)):
        last = last_of(bench.outputs(group))
        assert (last.finish_reason, last.beam_steps) == (reason, ())
