"""Requests of many rows, step by step over the fake model: beams, samples, scores, embeddings, and freed resources.

The fake model reads earlier tokens of a row from its cache blocks, so a wrongly shared, copied or freed block causes a
wrong answer. Beams are compared with transformers' search over the same logits.
"""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from antiphon.controls.table import EarlyStopping
from antiphon.domain.errors import EngineFault, InvalidArgument
from antiphon.domain.request import Arrival, FinishReason, Pooling, Request, StopMatcher, Task, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.sequence import SequenceGroup, SequenceState
from tests.fakes import BOS_ID, EOS_ID, FIRST_WORD_ID, changed, request_of, scored, source_of, stream_of
from tests.parity.search_steps import check_steps, replay
from tests.parity.transformers_reference import LogitsOf, Reference, generate
from tests.unit.engine.step_bench import Bench

WORDS = st.integers(FIRST_WORD_ID, 60)


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop, max_rows=8, num_blocks=200, reads_history=True)


class StopAt:
    """Stop matcher that stops at one token, like a stop string."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def push(self, token_id: int) -> bool:
        return token_id == self._token_id


def reference(bench: Bench, request: Request) -> list[tuple[list[int], float | None]]:
    """Return the output of transformers' `generate` for a request over the fake model's logits."""
    return generate(
        Reference(logits_of(bench, request), bos_id=BOS_ID, eos_id=EOS_ID), **search_options(bench, request)
    )


def logits_of(bench: Bench, request: Request) -> LogitsOf:
    """Return the logits of the fake model for a request's source."""
    return lambda target: bench.runner.logits_after(request.source_ids, target)


def search_options(bench: Bench, request: Request) -> dict[str, Any]:
    """Return the options of transformers' `generate` for a request."""
    params, room = request.params, bench.runner.facts.max_target_len - len(request.prefix_ids)
    return dict(
        prefix=request.prefix_ids,
        max_new_tokens=min(params.max_new_tokens or room, room),
        num_beams=params.beam_width,
        num_return_sequences=params.num_return_sequences,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping.value,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        min_new_tokens=params.min_new_tokens,
        forced_bos_token_id=None if request.prefix_ids else params.forced_first_id,
        eos_token_id=[EOS_ID, *params.stop_ids],
    )


@st.composite
def beam_requests(draw: st.DrawFn, name: str) -> Request:
    width, max_new_tokens = draw(st.integers(2, 4)), draw(st.integers(1, 14))
    params = SamplingParams(
        beam_width=width,
        num_return_sequences=draw(st.integers(1, width)),
        max_new_tokens=max_new_tokens,
        length_penalty=draw(st.sampled_from([1.0, 0.0, 2.0])),
        early_stopping=draw(st.sampled_from(EarlyStopping)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 2])),
        min_new_tokens=min(max_new_tokens, draw(st.sampled_from([0, 3]))),
        forced_first_id=draw(st.sampled_from([None, None, 9])),
        stop_ids=draw(st.sampled_from([(), (11, 12)])),
    )
    prefix = tuple(draw(st.lists(WORDS, max_size=6))) if params.forced_first_id is None else ()
    source = source_of(target_len=draw(st.integers(1, 12)), length=draw(st.integers(2, 9)))
    return request_of(name, source, params=params, prefix=prefix)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_searches_in_a_crowd_are_those_of_each_alone(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True, is_recurrent=data.draw(st.booleans()))
    asked = [data.draw(beam_requests(str(index))) for index in range(data.draw(st.integers(1, 9)))]
    groups = []
    for request in asked:
        groups.append(bench.ask(request))
        for _ in range(data.draw(st.integers(0, 2))):
            bench.step()
    bench.finish()
    assert bench.pool.num_free == bench.pool.num_blocks
    for request, group in zip(asked, groups, strict=True):
        events = bench.outputs(group)
        found = [(list(event.token_ids), event.score) for event in events if event.score is not None]
        # transformers also returns beams without a text, which it marks by their score.
        expected = [(ids, score) for ids, score in reference(bench, request) if score is not None and score > -1e6]
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_sources_of_searches_are_encoded_early_and_their_beams_start_together(bench: Bench) -> None:
    params = SamplingParams(beam_width=4, max_new_tokens=4, ignore_eos=True)
    runs: list[int] = []
    bench.runner.before_encode = lambda sources: runs.append(len(sources))
    limited = dataclasses.replace(params, time_limit_s=5.0)
    asked = [params, params, limited, params, *[params] * 6]
    groups = [bench.add(str(i), source_of(target_len=9, length=2, variant=i), one) for i, one in enumerate(asked)]
    bench.step()
    assert runs == [4]  # two searches of four rows, and two early ones
    assert [group.num_running_rows for group in groups[:5]] == [4, 4, 0, 0, 0]
    assert [group.state for group in groups[:5]] == [*[SequenceState.RUNNING] * 4, SequenceState.WAITING]
    bench.clock.advance(5.0)
    bench.step("3")
    assert [event.finish_reason for event in bench.outputs(groups[2])] == [FinishReason.TIME_LIMIT]
    assert groups[3].state is SequenceState.FINISHED
    while bench.stepper.has_work:
        bench.step()
        assert {group.num_running_rows for group in groups} <= {0, 4}
    assert sum(runs) == len(groups)
    for group in (*groups[:2], *groups[4:]):
        assert group.request.task is Task.GENERATE
        expected = reference(bench, group.request)
        assert [list(event.token_ids) for event in bench.outputs(group)] == [ids for ids, _ in expected[:1]]


def params_of(data: st.DataObject) -> SamplingParams:
    """Return random controls without conflicts."""
    if data.draw(st.booleans()):
        return data.draw(beam_requests("")).params
    return SamplingParams(
        temperature=0.8,
        seed=data.draw(st.integers(0, 9)),
        num_return_sequences=data.draw(st.integers(1, 4)),
        max_new_tokens=data.draw(st.integers(1, 12)),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5])),
        num_logprobs=data.draw(st.sampled_from([None, 0, 2])),
        stop_ids=data.draw(st.sampled_from([(), (11, 12, 13, 14)])),
        time_limit_s=data.draw(st.sampled_from([None, None, 3.0])),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_and_rows_are_consistent_after_any_mix_of_requests_cancels_and_faults(
    loop: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=data.draw(st.sampled_from([40, 200])), reads_history=True)

    def broken(num_rows: int) -> None:
        raise RuntimeError("a fault")

    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.sampled_from([0, 1, 1, 6]))):
            names.append(str(len(names)))
            source = source_of(target_len=data.draw(st.integers(1, 9)), length=data.draw(st.integers(2, 9)))
            bench.add(names[-1], source, params_of(data))
        bench.clock.advance(data.draw(st.sampled_from([0.0, 1.0])))
        bench.runner.before_decode = broken if data.draw(st.integers(0, 9)) == 0 else lambda num_rows: None
        bench.step(*(name for name in names if data.draw(st.integers(0, 6)) == 0))
    bench.runner.before_decode = lambda num_rows: None
    bench.finish()
    assert bench.pool.num_free == bench.pool.num_blocks
    for group in bench.all:
        events = bench.outputs(group)
        (last,) = [event for event in events if event.is_last]
        if last.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert [event.output_index for event in events] == list(range(group.request.params.num_return_sequences))


def drain(bench: Bench, group_name: str, request: Request) -> tuple[list[TokenEvent], tuple[int, ...]]:
    """Read a streamed request after each step. Return every event, and the tokens of the first output."""
    group = bench.ask(changed(request, request_id=group_name))
    events: list[TokenEvent] = []

    async def read() -> None:
        events.extend([event async for event in stream_of(group)])

    reader = bench.loop.create_task(read())
    while bench.stepper.has_work:
        bench.step()
        bench.loop.run_until_complete(asyncio.sleep(0))
    bench.loop.run_until_complete(asyncio.wait_for(reader, 30))
    streamed_ids = tuple(token_id for event in events if event.output_index == 0 for token_id in event.token_ids)
    return events, streamed_ids


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_streamed_search_sends_a_prefix_of_its_best_one(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=200, reads_history=True)
    request = data.draw(beam_requests("whole"))
    whole = bench.ask(dataclasses.replace(request, is_streamed=False))
    bench.finish()
    expected = bench.outputs(whole)
    events, streamed_ids = drain(bench, "streamed", request)
    assert streamed_ids == expected[0].token_ids
    assert [event.finish_reason for event in events if event.finish_reason] == [one.finish_reason for one in expected]


def test_streamed_search_sends_the_common_prefix_of_its_beams_before_its_end(bench: Bench) -> None:
    params = SamplingParams(beam_width=2, max_new_tokens=10, forced_first_id=9, ignore_eos=True)
    events, _ = drain(bench, "a", request_of("a", source_of(target_len=12), params=params))
    assert events[0].token_ids[0] == 9
    assert events[0].finish_reason is None


def test_samples_of_a_request_equal_those_of_separate_requests(bench: Bench) -> None:
    params = SamplingParams(temperature=1.0, seed=7, num_return_sequences=4, max_new_tokens=9)
    together = bench.add("together", source_of(target_len=9), params)
    fewer = bench.add("fewer", source_of(target_len=9), dataclasses.replace(params, num_return_sequences=2))
    bench.finish()
    many, few = bench.outputs(together), bench.outputs(fewer)
    assert [event.token_ids for event in many[:2]] == [event.token_ids for event in few]
    assert len({event.token_ids for event in many}) > 1
    assert len(bench.runner.encoded[0]) == 2  # one source for each request, not for each sample
    (last,) = [event for event in many if event.is_last]
    assert last.num_generated == sum(len(e.token_ids) + (e.finish_reason is FinishReason.STOP) for e in many)


def test_prefix_counts_once_for_a_new_group(bench: Bench) -> None:
    source, prefix = source_of(target_len=9, length=7), (5, 6, 7)
    sampled = SamplingParams(temperature=1.0, num_return_sequences=4, max_new_tokens=2)
    searched = SamplingParams(beam_width=4, max_new_tokens=2)
    groups = [bench.add(name, source, p, prefix=prefix) for name, p in (("s", sampled), ("b", searched))]
    assert [group.num_prefill_tokens for group in groups] == [7 + 3, 7 + 3]
    bench.step()
    assert bench.runner.decoded_tokens == [4 * 4]  # 19 tokens exceed the 16 of a step, so they are fed alone
    bench.finish()
    # The second tokens of the samples, the prefix in the search's first row, and a begin token in its other rows.
    assert bench.runner.decoded_tokens[1:3] == [4 + 4 + 3, 4]


def test_beams_share_blocks_of_common_tokens(bench: Bench) -> None:
    params = SamplingParams(beam_width=4, max_new_tokens=20, ignore_eos=True)
    group = bench.add("a", source_of(target_len=30), params, prefix=tuple(range(10, 21)))
    bench.step()
    reserved = group.num_blocks
    for _ in range(4):
        bench.step()
    assert len(group.blocks) < reserved  # all beams read one copy of the prefix
    bench.finish()


def test_time_limit_returns_the_output_so_far(bench: Bench) -> None:
    sampled = SamplingParams(time_limit_s=5.0)
    searched = SamplingParams(time_limit_s=5.0, beam_width=2, num_return_sequences=2, ignore_eos=True)
    groups = [bench.add(name, source_of(target_len=25), p) for name, p in (("a", sampled), ("b", searched))]
    for _ in range(3):
        bench.step()
    bench.clock.advance(5.0)
    late = bench.add("late", source_of(target_len=3), dataclasses.replace(sampled, time_limit_s=0.001))
    bench.clock.advance(1.0)
    bench.step()
    bench.finish()
    for group in groups:
        for event in bench.outputs(group):
            assert (event.finish_reason, len(event.token_ids), event.error) == (FinishReason.TIME_LIMIT, 3, None)
    (event,) = bench.outputs(late)
    assert (event.finish_reason, event.token_ids) == (FinishReason.TIME_LIMIT, ())


def test_stop_string_ends_the_output_with_the_token_that_completes_it(bench: Bench) -> None:
    request = request_of("free", source_of(target_len=9))
    free = bench.ask(request)
    bench.finish()
    token_ids = bench.output(free).token_ids

    def matcher() -> StopMatcher:
        return StopAt(token_ids[4])

    stopped = bench.ask(changed(request, request_id="stopped", stop_matcher=matcher))
    by_id = bench.add("by id", request.source_ids, SamplingParams(stop_ids=(token_ids[4],), num_logprobs=0))
    bench.finish()
    event = bench.output(stopped)
    assert (event.finish_reason, event.token_ids) == (FinishReason.STOP_SEQUENCE, token_ids[:5])
    event = bench.output(by_id)
    assert (event.finish_reason, event.token_ids) == (FinishReason.STOP_SEQUENCE, token_ids[:4])
    assert [one.token_id for one in event.logprobs] == list(token_ids[:5])


def test_constraints_that_leave_no_token_end_the_output(bench: Bench) -> None:
    nothing = SamplingParams(allowed_ids=(20,), no_repeat_ngram_size=1, ignore_eos=True)
    single = bench.add("single", source_of(target_len=9), nothing)
    beams = bench.add("beams", source_of(target_len=9), dataclasses.replace(nothing, beam_width=2))
    bench.finish()
    event = bench.output(single)
    assert (event.finish_reason, event.token_ids) == (FinishReason.EXHAUSTED, (20,))
    assert bench.output(beams).finish_reason is FinishReason.EXHAUSTED


def test_forced_first_token_is_produced_and_scored(bench: Bench) -> None:
    params = SamplingParams(forced_first_id=33, max_new_tokens=3, num_logprobs=1)
    group = bench.add("a", source_of(target_len=9), params, prefix=(5, 6))
    bench.finish()
    event = bench.output(group)
    assert (event.token_ids[0], event.num_generated) == (33, 3)
    logits = bench.runner.logits_after(group.request.source_ids, (BOS_ID, 5, 6)).astype(np.float64)
    expected = logits[33] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert event.logprobs[0].logprob == pytest.approx(expected, abs=1e-5)
    assert event.logprobs[0].alternatives[0][0] == logits.argmax()


def test_score_equals_the_log_probability_that_generation_reports(bench: Bench) -> None:
    running = bench.add("running", source_of(target_len=12))
    params = SamplingParams(num_logprobs=2)
    source = source_of(target_len=6, variant=1)
    written = bench.add("written", source, params)
    bench.finish()
    event = bench.output(written)
    target_ids = (*event.token_ids, EOS_ID)
    again = bench.add("again", source_of(target_len=8))
    asked = bench.ask(scored(request_of("score", source, params=params), target_ids))
    bench.finish()
    score = bench.output(asked)
    assert score.logprobs == event.logprobs
    assert score.score == pytest.approx(event.score)
    assert (score.finish_reason, score.num_generated, score.token_ids) == (FinishReason.STOP, 0, ())
    assert bench.output(running).finish_reason is bench.output(again).finish_reason


def test_score_includes_a_target_without_end_token(bench: Bench) -> None:
    asked = bench.ask(scored(request_of("score", source_of(target_len=6)), (9, 8, 7)))
    bench.finish()
    event = bench.output(asked)
    assert [one.token_id for one in event.logprobs] == [9, 8, 7]
    assert (event.finish_reason, event.token_ids) == (FinishReason.STOP, ())


def test_first_token_of_a_search_can_be_forced_after_a_prefix(bench: Bench) -> None:
    """Only the first beam has the prefix in its blocks, so no other beam may continue from its own blocks."""
    params = SamplingParams(beam_width=3, num_return_sequences=3, forced_first_id=9, max_new_tokens=5, ignore_eos=True)
    group = bench.add("a", source_of(target_len=9), params, prefix=(5, 6, 7))
    bench.finish()
    outputs = bench.outputs(group)
    assert [event.token_ids[0] for event in outputs] == [9, 9, 9]
    assert len({event.token_ids for event in outputs}) == 3


def vector_of(event: TokenEvent) -> NDArray[np.float32]:
    assert event.encoder_outputs is not None
    return event.encoder_outputs.values


def test_embedding_pools_the_states_of_its_own_source(bench: Bench) -> None:
    source, other = source_of(target_len=3, length=7), source_of(target_len=2, length=4)
    bench.add("other", other)
    asked = [
        Request(
            task=Task.EMBED,
            arrival=Arrival(request_id=pooling.name, arrival_s=0.0),
            source_ids=source,
            pooling=pooling,
            normalize=normalize,
        )
        for pooling, normalize in ((Pooling.MEAN, False), (Pooling.MAX, True), (Pooling.FIRST, False))
    ]
    mean, largest, first = (bench.ask(request) for request in asked)
    bench.finish()
    states = bench.runner.memory(source)
    assert vector_of(bench.output(mean)) == pytest.approx(states.mean(axis=0), abs=1e-6)
    assert vector_of(bench.output(first)) == pytest.approx(states[0], abs=1e-6)
    top = states.max(axis=0)
    assert vector_of(bench.output(largest)) == pytest.approx(top / np.linalg.norm(top), abs=1e-6)


def test_request_is_refused_when_it_needs_more_rows_than_a_batch_has(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="beam_width is 9; it must be at most 8"):
        bench.add("a", source_of(target_len=3), SamplingParams(beam_width=9))


def test_fault_while_blocks_are_copied_ends_its_step_and_not_the_engine(bench: Bench) -> None:
    params = SamplingParams(beam_width=4, ignore_eos=True, max_new_tokens=9)
    broken = bench.add("broken", source_of(target_len=9), params)

    def fail(sources: object, targets: object) -> None:
        raise RuntimeError("no copy")

    bench.runner.copy_blocks = fail  # type: ignore[method-assign]
    bench.step()
    del bench.runner.copy_blocks
    assert bench.pool.num_free == bench.pool.num_blocks
    assert isinstance(bench.output(broken).error, EngineFault)
    whole = bench.add("whole", source_of(target_len=9), params)
    bench.finish()
    assert bench.output(whole).finish_reason is FinishReason.LENGTH


def test_occupancy_decreases_with_the_blocks_that_beams_free(bench: Bench) -> None:
    params = SamplingParams(beam_width=4, max_new_tokens=20, ignore_eos=True)
    bench.add("a", source_of(target_len=30), params, prefix=tuple(range(10, 21)))
    for _ in range(6):
        bench.step()
        assert bench.sample("kv_cache_blocks", use="free") == bench.pool.num_free
    bench.finish()


ENDS = (FinishReason.STOP, FinishReason.STOP_SEQUENCE)


def asking(bench: Bench, name: str, params: SamplingParams, *, target_len: int = 9) -> Request:
    request = request_of(name, source_of(target_len=target_len), params=params, arrival_s=bench.clock())
    return dataclasses.replace(request, reports_beam_steps=True)


def last_of(events: tuple[TokenEvent, ...]) -> TokenEvent:
    (last,) = [event for event in events if event.is_last]
    assert not any(event.beam_steps for event in events if event is not last)
    return last


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_steps_of_searches_in_a_crowd_are_those_alone(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
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
