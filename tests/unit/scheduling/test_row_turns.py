"""Rows taken from one caller for another: after which steps, how many, and with the same answers."""

import asyncio
import dataclasses
import random
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import FinishReason, Priority, Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.row_budget import CALM_STEPS, LONE_STEPS, PATIENCE_STEPS
from antiphon.engine.sequence import SequenceGroup, SequenceState
from tests.fakes import changed, request_of, source_of
from tests.unit.engine.step_bench import Bench, expected
from tests.unit.scheduling.test_preemption import random_request, seen

ROWS = 16
BLOCKS = ROWS * 16  # enough for the longest rows of the fake model, so that no request waits for blocks
START_STEPS = PATIENCE_STEPS + 2  # maximum number of steps until another caller has started


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop, max_rows=ROWS, num_blocks=BLOCKS, reads_history=True)


def samples_of(name: str, count: int, *, client: str = "many", length: int = 30) -> Request:
    """Return a request with a number of samples, each with the same number of tokens."""
    params = SamplingParams(
        max_new_tokens=length, ignore_eos=True, temperature=1.0, seed=len(name), num_return_sequences=count
    )
    return changed(request_of(name, source_of(target_len=30), params=params), client=client)


def short_of(name: str, *, client: str = "few", length: int = 3) -> Request:
    made = request_of(name, source_of(target_len=length), params=SamplingParams(max_new_tokens=length))
    return changed(made, client=client)


def rows_of(bench: Bench, client: str) -> int:
    return sum(group.num_running_rows for group in bench.all if group.request.client == client)


def steps_until_begun(bench: Bench, group: SequenceGroup, limit: int = 200) -> int:
    """Return the number of steps until a group has its first token."""
    for step in range(1, limit):
        bench.step()
        if group.first_token_s is not None:
            return step
    raise AssertionError(f"{group.request_id} has not begun after {limit} steps")


def answers(events: tuple[TokenEvent, ...]) -> list[tuple[object, ...]]:
    return [*map(seen, events)]


def test_other_caller_starts_within_a_few_steps_when_one_request_has_every_row(bench: Bench) -> None:
    many = bench.ask(samples_of("many", ROWS))
    bench.step()
    assert rows_of(bench, "many") == ROWS
    few = bench.ask(short_of("few"))
    assert steps_until_begun(bench, few) <= START_STEPS
    assert (rows_of(bench, "many"), rows_of(bench, "few")) == (ROWS - 1, 1)
    bench.finish()
    assert bench.output(few).finish_reason is not FinishReason.ERROR
    assert len(bench.outputs(many)) == ROWS


def test_other_caller_starts_within_a_few_steps_beside_many_requests(
    loop: asyncio.AbstractEventLoop,
) -> None:
    bench = Bench(loop, max_rows=ROWS, num_blocks=BLOCKS)
    long = [bench.ask(short_of(f"long {index}", client="many", length=30)) for index in range(2 * ROWS)]
    while rows_of(bench, "many") < ROWS:
        bench.step()
    few = bench.ask(short_of("few"))
    assert steps_until_begun(bench, few) <= START_STEPS
    bench.finish()
    for group in (*long, few):
        assert bench.output(group).token_ids == expected(bench, group)[0]


def test_caller_keeps_every_row_while_no_other_caller_waits(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=ROWS, num_blocks=BLOCKS)
    for index in range(3):
        bench.ask(samples_of(f"many {index}", ROWS))
    bench.finish()
    assert bench.sample("preemptions_total") == 0
    assert max(bench.runner.decoded_rows) == ROWS


def test_two_callers_of_many_samples_get_half_of_the_rows_each(bench: Bench) -> None:
    first = bench.ask(samples_of("first", ROWS, client="first"))
    bench.step()
    second = bench.ask(samples_of("second", ROWS, client="second"))
    steps_until_begun(bench, second)
    assert (rows_of(bench, "first"), rows_of(bench, "second")) == (ROWS // 2, ROWS // 2)
    while second.state is not SequenceState.FINISHED:
        bench.step()
        assert rows_of(bench, "first") >= ROWS // 2 or first.num_finished
    bench.finish()


def test_rows_are_taken_only_once_for_a_caller_that_sends_request_after_request(bench: Bench) -> None:
    bench.ask(samples_of("many", ROWS))
    bench.step()
    for index in range(6):
        few = bench.ask(short_of(f"few {index}"))
        steps_until_begun(bench, few)
        while few.state is not SequenceState.FINISHED:
            bench.step()
    assert bench.sample("preemptions_total") == 1
    bench.finish()


def test_row_is_returned_when_the_other_caller_has_left(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=4, num_blocks=160, reads_history=True, max_target_len=120)
    many = bench.ask(samples_of("many", 4, length=100))
    bench.step()
    few = bench.ask(short_of("few"))
    while few.state is not SequenceState.FINISHED:
        bench.step()
    for _ in range(CALM_STEPS):
        bench.step()
    assert many.num_running_rows == 4
    bench.finish()


def test_rows_that_end_soon_are_not_taken(loop: asyncio.AbstractEventLoop) -> None:
    """The next caller waits for one of the short answers to end."""
    bench = Bench(loop, max_rows=4, num_blocks=64)
    for index in range(12):
        bench.ask(short_of(f"many {index}", client="many", length=2 + index % 3))
    for _ in range(3):
        bench.step()
    few = bench.ask(short_of("few"))
    assert steps_until_begun(bench, few) <= START_STEPS
    bench.finish()
    assert bench.sample("preemptions_total") == 0


def test_samples_run_one_after_the_other_when_fewer_rows_are_free(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=4, num_blocks=64, reads_history=True)
    bench.ask(short_of("long", length=20))
    bench.step()
    many = bench.ask(samples_of("many", 4, length=8))
    steps_until_begun(bench, many)
    assert (many.num_running_rows, len(many.pending)) == (3, 1)
    bench.finish()
    events = bench.outputs(many)
    assert [len(event.token_ids) for event in events] == [8] * 4
    alone = Bench(loop, max_rows=4, num_blocks=64, reads_history=True)
    same_alone = alone.ask(many.request)
    alone.finish()
    assert answers(events) == answers(alone.outputs(same_alone))


@pytest.mark.parametrize("how", ["cancelled", "deadline", "time limit"])
def test_request_can_end_while_some_of_its_samples_wait_for_rows(loop: asyncio.AbstractEventLoop, how: str) -> None:
    bench = Bench(loop, max_rows=4, num_blocks=64, reads_history=True)
    made = samples_of("many", 4)
    limit_s = 5.0 if how == "time limit" else None
    deadline_s = bench.clock() + 5.0 if how == "deadline" else None
    params = dataclasses.replace(made.params, time_limit_s=limit_s)
    many = bench.ask(changed(made, params=params, arrival_s=bench.clock(), deadline_s=deadline_s))
    bench.step()
    few = bench.ask(short_of("few", length=20))
    steps_until_begun(bench, few)
    assert many.pending
    assert many.pending[0].produced
    if how != "cancelled":
        bench.clock.advance(5.0)
    bench.step(*(["many"] if how == "cancelled" else []))
    assert many.state is SequenceState.FINISHED
    events = bench.outputs(many)
    assert sum(event.is_last for event in events) == 1
    if how == "time limit":
        assert [(event.output_index, event.finish_reason) for event in events] == [
            (index, FinishReason.TIME_LIMIT) for index in range(4)
        ]
        assert all(event.token_ids for event in events)
    bench.finish()
    assert bench.pool.num_free == bench.pool.num_blocks


def searches_of(bench: Bench, count: int) -> list[SequenceGroup]:
    """Ask for searches of four beams by one caller."""
    params = SamplingParams(max_new_tokens=30, beam_width=4)
    return [
        bench.ask(changed(request_of(f"search {index}", source_of(target_len=30), params=params), client="many"))
        for index in range(count)
    ]


def test_beams_of_one_caller_leave_a_row_to_others(bench: Bench) -> None:
    """Beams keep their rows, so their number of rows is bounded in advance where others ask now and then."""
    bench.ask(short_of("earlier"))
    others = bench.ask(short_of("beside", client="beside"))
    bench.finish()
    assert others.state is SequenceState.FINISHED
    searches = searches_of(bench, 6)
    bench.step()
    assert rows_of(bench, "many") == 12
    few = bench.ask(short_of("few"))
    assert steps_until_begun(bench, few) <= 2
    bench.finish()
    assert all(group.state is SequenceState.FINISHED for group in searches)
    assert bench.sample("preemptions_total") == 0


@pytest.mark.parametrize("num_lone_steps", [LONE_STEPS // 2, LONE_STEPS])
def test_beams_of_a_lone_caller_take_all_rows_until_another_one_asks(bench: Bench, num_lone_steps: int) -> None:
    searches = searches_of(bench, 12)
    bench.step()
    assert rows_of(bench, "many") == ROWS
    few = bench.ask(short_of("few", length=20))
    while not any(search.state is SequenceState.FINISHED for search in searches):
        bench.step()
    assert steps_until_begun(bench, few) <= 2
    assert rows_of(bench, "many") <= 12
    bench.finish()
    assert all(group.state is SequenceState.FINISHED for group in searches)
    for _ in range(num_lone_steps):
        bench.step()
    searches_of(bench, 6)
    bench.step()
    assert rows_of(bench, "many") == (ROWS if num_lone_steps == LONE_STEPS else 12)


def test_beam_search_as_wide_as_all_rows_runs(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=8, num_blocks=128, reads_history=True)
    params = SamplingParams(max_new_tokens=5, beam_width=8)
    wide = bench.ask(request_of("wide", source_of(target_len=5), params=params))
    bench.finish()
    assert bench.outputs(wide)[0].error is None


def test_blocks_are_taken_from_the_caller_with_the_most_blocks(loop: asyncio.AbstractEventLoop) -> None:
    """Free rows do not help a caller if no blocks are left."""
    bench = Bench(loop, max_rows=ROWS, num_blocks=40, reads_history=True)
    many = bench.ask(samples_of("many", 4))
    bench.step()
    assert bench.pool.num_free < bench.pool.num_blocks // 4
    few = bench.ask(samples_of("few", 1, client="few"))
    assert steps_until_begun(bench, few) <= START_STEPS
    bench.finish()
    assert len(bench.outputs(many)) == 4


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), max_rows=st.integers(4, 10), num_blocks=st.sampled_from([24, 60, 160]))
def test_requests_of_a_crowd_of_callers_get_the_answers_alone(seed: int, max_rows: int, num_blocks: int) -> None:
    dice = random.Random(seed)
    with closing(asyncio.new_event_loop()) as loop:
        crowded = Bench(loop, max_rows=max_rows, num_blocks=num_blocks, reads_history=True)
        for index in range(14):
            request = random_request(dice, str(index))
            if request.params.temperature:
                count = dice.choice([1, 2, max_rows])
                request = dataclasses.replace(
                    request, params=dataclasses.replace(request.params, num_return_sequences=count)
                )
            client = "many" if index < 5 else dice.choice("xyz")
            try:
                crowded.ask(changed(request, client=client, priority=dice.choice(list(Priority))))
            except InvalidArgument:
                continue
            for _ in range(dice.choice([0, 1, 5, 12])):
                names = [group.request_id for group in crowded.all]
                crowded.step(*dice.sample(names, int(dice.random() < 0.03)))
        crowded.finish()
        assert crowded.pool.num_free == crowded.pool.num_blocks
        alone = Bench(loop, max_rows=10, num_blocks=200, reads_history=True)
        for group in crowded.all:
            together = crowded.outputs(group)
            assert sum(event.is_last for event in together) == 1
            same_alone = alone.ask(group.request)
            alone.finish()
            if all(event.finish_reason is not FinishReason.CANCELLED for event in together):
                assert answers(together) == answers(alone.outputs(same_alone))
