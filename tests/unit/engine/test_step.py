"""Single steps without the engine's thread: requests, their prefixes, rows that are freed, and most cache blocks."""

import asyncio
import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest

from antiphon.domain.errors import DeadlineExceeded, EngineFault, InvalidArgument, QueueFull
from antiphon.domain.request import Arrival, CancelCause, FinishReason, Request, Task
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.sequence import SequenceGroup, SequenceState
from antiphon.ops.cache_geometry import blocks_for
from tests.fakes import EOS_ID, changed, request_of, scored, source_of, stream_of
from tests.unit.engine.step_bench import BLOCK_SIZE, Bench, expected


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop)


def row_of(group: SequenceGroup) -> int | None:
    (sequence,) = group.sequences
    return sequence.row


def test_step_decodes_the_first_token_in_the_step_that_encodes(bench: Bench) -> None:
    sequence = bench.add("a", source_of(target_len=3))
    bench.step()
    assert bench.runner.decoded_rows == [1]
    assert sequence.first_token_s == bench.clock()


def test_step_joins_a_new_request_to_the_running_ones(bench: Bench) -> None:
    first = bench.add("first", source_of(target_len=6))
    bench.step()
    second = bench.add("second", source_of(target_len=6))
    bench.step()
    assert bench.runner.decoded_rows == [1, 2]
    assert (row_of(first), row_of(second)) == (0, 1)


def test_step_removes_a_finished_request_and_fills_its_row(bench: Bench) -> None:
    short, longer, longest = (bench.add(str(n), source_of(target_len=n)) for n in (1, 3, 5))
    bench.step()
    bench.step()
    assert short.state is SequenceState.FINISHED
    assert (row_of(longer), row_of(longest)) == (1, 0)
    bench.finish()
    for sequence in (short, longer, longest):
        event = bench.output(sequence)
        assert (event.token_ids, event.finish_reason) == expected(bench, sequence)


def test_step_encodes_sources_of_any_lengths_together(bench: Bench) -> None:
    for i, length in enumerate((3, 5, 3)):
        bench.add(str(i), source_of(target_len=2, length=length, variant=i))
    bench.step()
    assert [[len(source) for source in run] for run in bench.runner.encoded] == [[3, 5, 3]]
    bench.finish()


def test_step_ends_a_request_at_the_requested_number_of_tokens(bench: Bench) -> None:
    sequence = bench.add("a", source_of(target_len=9), SamplingParams(max_new_tokens=4))
    exact = bench.add("b", source_of(target_len=3), SamplingParams(max_new_tokens=4))
    bench.finish()
    event = bench.output(sequence)
    assert (event.finish_reason, event.num_generated, len(event.token_ids)) == (FinishReason.LENGTH, 4, 4)
    event = bench.output(exact)
    assert (event.finish_reason, event.num_generated, len(event.token_ids)) == (FinishReason.STOP, 4, 3)


def test_step_fills_the_whole_target_when_no_end_token_comes(bench: Bench) -> None:
    sequence = bench.add("a", source_of(target_len=60))
    bench.step()
    assert len(sequence.sequences[0].self_block_table) == blocks_for(bench.runner.facts.max_target_len, BLOCK_SIZE)
    bench.finish()
    event = bench.output(sequence)
    assert (event.finish_reason, event.num_generated) == (FinishReason.LENGTH, bench.runner.facts.max_target_len)


def test_step_frees_a_cancelled_running_request_within_one_step(bench: Bench) -> None:
    kept, cancelled = bench.add("kept", source_of(target_len=4)), bench.add("cancelled", source_of(target_len=20))
    bench.step()
    used = bench.pool.num_used
    bench.step("cancelled")
    assert cancelled.state is SequenceState.FINISHED
    assert bench.pool.num_used == used - cancelled.num_blocks
    assert bench.runner.decoded_rows == [2, 1]
    event = bench.output(cancelled)
    assert (event.finish_reason, event.num_generated, event.error) == (FinishReason.CANCELLED, 1, None)
    bench.finish()
    assert bench.output(kept).token_ids == expected(bench, kept)[0]


def test_step_never_encodes_a_request_cancelled_while_waiting(bench: Bench) -> None:
    sequence = bench.add("a", source_of(target_len=4))
    bench.step("a", "unknown", "a")
    assert not bench.runner.encoded
    assert not bench.runner.decoded_rows
    event = bench.output(sequence)
    assert (event.finish_reason, event.num_generated) == (FinishReason.CANCELLED, 0)
    assert event.timing is not None
    assert event.timing.queued_s is None
    assert bench.sample("cancellations_total", stage="waiting", cause="client") == 1


def test_step_decodes_nothing_for_requests_cancelled_while_they_were_encoded(bench: Bench) -> None:
    running = bench.add("running", source_of(target_len=6))
    bench.step()
    kept, cancelled = bench.add("kept", source_of(target_len=4)), bench.add("cancelled", source_of(target_len=20))
    late = bench.add("late", source_of(target_len=20), within_s=1.0)

    def hang_up(sources: object) -> None:
        for request_id in ("cancelled", "running"):
            bench.cancellations.put(request_id, CancelCause.CLIENT)
        bench.clock.advance(1.0)

    bench.runner.before_encode = hang_up
    bench.step()
    assert bench.runner.decoded_rows == [1, 2]
    assert running.state is SequenceState.RUNNING  # its row was in use; it leaves before the next step
    assert {group.stream.end_reason for group in (cancelled, late)} == {FinishReason.CANCELLED, FinishReason.DEADLINE}
    assert bench.sample("cancellations_total", stage="encoding", cause="client") == 1
    assert bench.sample("deadline_misses_total", stage="encoding") == 1
    bench.runner.before_encode = lambda sources: None
    bench.finish()
    assert running.stream.end_reason is FinishReason.CANCELLED
    assert bench.output(kept).token_ids == expected(bench, kept)[0]


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_step_ends_every_output_when_time_passes_during_the_encoder_run(bench: Bench, num_outputs: int) -> None:
    """Regression: it ended none of them, and the engine's thread stopped with an error."""
    params = SamplingParams(time_limit_s=1.0, temperature=1.0, num_return_sequences=num_outputs)
    group = bench.add("a", source_of(target_len=20), params)
    bench.runner.before_encode = lambda sources: bench.clock.advance(1.0)
    bench.step()
    bench.finish()
    reasons = [event.finish_reason for event in bench.outputs(group)]
    assert reasons == [FinishReason.TIME_LIMIT] * num_outputs


def test_step_counts_a_cancellation_by_a_deadline_as_a_deadline_miss(bench: Bench) -> None:
    group = bench.add("a", source_of(target_len=20), within_s=1.0)
    bench.step()
    bench.cancellations.put("a", CancelCause.DEADLINE)
    bench.step()
    assert group.stream.end_reason is FinishReason.DEADLINE
    assert bench.sample("deadline_misses_total", stage="running") == 1
    assert bench.sample("cancellations_total", stage="running", cause="deadline") is None


def test_step_ends_requests_whose_deadline_has_passed(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=1)
    running = bench.add("running", source_of(target_len=20), within_s=2.0)
    waiting = bench.add("waiting", source_of(target_len=20), within_s=1.0)
    patient = bench.add("patient", source_of(target_len=2))
    bench.step()
    bench.clock.advance(1.0)
    bench.step()
    assert waiting.state is SequenceState.FINISHED
    assert running.state is SequenceState.RUNNING
    bench.clock.advance(1.0)
    bench.step()
    assert patient.state is SequenceState.RUNNING
    for sequence, stage in ((running, "running"), (waiting, "waiting")):
        event = bench.output(sequence)
        assert event.finish_reason is FinishReason.DEADLINE
        assert isinstance(event.error, DeadlineExceeded)
        assert bench.sample("deadline_misses_total", stage=stage) == 1
    bench.finish()


def test_step_fails_only_the_source_that_the_encoder_refuses(bench: Bench) -> None:
    running = bench.add("running", source_of(target_len=5))
    bench.step()
    bad = bench.add("bad", source_of(target_len=5, length=4))
    good = bench.add("good", source_of(target_len=5, length=5))

    def fail(sources: list[tuple[int, ...]]) -> None:
        if any(len(source) == 4 for source in sources):
            raise RuntimeError("no memory")

    bench.runner.before_encode = fail  # type: ignore[assignment]
    bench.step()
    assert isinstance(bench.output(bad).error, EngineFault)
    bench.finish()
    for sequence in (running, good):
        assert bench.output(sequence).token_ids == expected(bench, sequence)[0]


def test_step_fails_every_row_of_a_decoder_run_that_raised_and_continues(bench: Bench) -> None:
    sequences = [bench.add(str(i), source_of(target_len=5, variant=i)) for i in range(3)]

    def fail(num_rows: int) -> None:
        raise RuntimeError("no memory")

    healthy, bench.runner.before_decode = bench.runner.before_decode, fail
    bench.step()
    assert [bench.output(sequence).finish_reason for sequence in sequences] == [FinishReason.ERROR] * 3
    assert bench.sample("request_errors_total", stage="running") == 3
    bench.runner.before_decode = healthy
    later = bench.add("later", source_of(target_len=5))
    bench.finish()
    assert bench.output(later).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_fails_only_the_request_whose_logits_are_not_finite(bench: Bench, bad: float) -> None:
    source = source_of(target_len=9, variant=3)
    bench.runner.overrides[source] = np.full(bench.runner.facts.vocab_size, bad, np.float32)
    broken, healthy = bench.add("broken", source), bench.add("healthy", source_of(target_len=4))
    bench.finish()
    event = bench.output(broken)
    assert (event.finish_reason, event.token_ids, event.num_generated) == (FinishReason.ERROR, (), 0)
    assert bench.output(healthy).token_ids == expected(bench, healthy)[0]


def test_step_gives_a_sampled_request_the_same_tokens_alone_and_in_a_batch(loop: asyncio.AbstractEventLoop) -> None:
    params = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, seed=99)
    outputs = []
    for neighbours in (0, 3):
        bench = Bench(loop)
        for i in range(neighbours):
            bench.add(f"neighbour{i}", source_of(target_len=1 + i, variant=i), SamplingParams(temperature=1.0, seed=i))
        sequence = bench.add("a", source_of(target_len=12))
        sequence = bench.add("sampled", source_of(target_len=12), params)
        bench.finish()
        outputs.append(bench.output(sequence).token_ids)
    assert outputs[0] == outputs[1]
    assert outputs[0] != expected(bench, sequence)[0]


def test_step_measures_latencies_by_the_clock(bench: Bench) -> None:
    sequence = bench.add("a", source_of(target_len=2))
    bench.clock.advance(3.0)
    bench.step()
    bench.clock.advance(0.5)
    bench.step()
    bench.clock.advance(0.5)
    bench.step()
    timing = bench.output(sequence).timing
    assert timing is not None
    assert (timing.queued_s, timing.first_token_s, timing.total_s) == (3.0, 3.0, 4.0)
    assert bench.sample("inter_token_latency_seconds_count") == 2
    assert bench.sample("inter_token_latency_seconds_sum") == 1.0
    assert bench.sample("time_to_first_token_seconds_sum") == 3.0
    assert bench.sample("request_queue_time_seconds_sum") == 3.0
    assert bench.sample("e2e_request_latency_seconds_sum") == 4.0


def test_row_that_the_runner_leaves_to_the_next_step_has_its_first_token_there(bench: Bench) -> None:
    bench.runner.leaves_joining = True
    bench.add("a", source_of(target_len=4))
    bench.step()
    joining = bench.add("b", source_of(target_len=3, variant=1))
    for _ in range(2):
        bench.clock.advance(1.0)
        bench.step()
    bench.finish()
    assert bench.runner.decoded_rows == [1, 1, 2, 2, 2, 1]
    event = bench.output(joining)
    assert (event.token_ids, event.finish_reason) == expected(bench, joining)
    assert event.timing is not None
    assert event.timing.first_token_s == 2.0
    assert bench.sample("generation_tokens_total") == sum(bench.runner.decoded_rows)
    assert bench.sample("time_to_first_token_seconds_count") == 2
    assert bench.sample("inter_token_latency_seconds_count") == 7


def test_row_that_the_runner_leaves_to_the_next_step_is_forced_there_and_not_later(bench: Bench) -> None:
    bench.runner.leaves_joining = True
    bench.add("a", source_of(target_len=8))
    bench.step()
    params = SamplingParams(max_new_tokens=4, forced_first_id=9)
    joining = bench.add("b", source_of(target_len=8, variant=1), params)
    bench.finish()
    expected_ids, _ = expected(bench, joining)
    assert expected_ids[0] != 9
    assert bench.output(joining).token_ids == (9, *expected_ids[1:])


def test_row_that_ends_before_its_first_step_is_not_counted(bench: Bench) -> None:
    bench.runner.leaves_joining = True
    bench.add("a", source_of(target_len=4))
    bench.step()
    bench.add("b", source_of(target_len=3, variant=1))
    bench.step()
    bench.step("b")
    bench.finish()
    assert bench.runner.decoded_rows == [1] * 5
    assert bench.sample("time_to_first_token_seconds_count") == 1
    assert bench.sample("inter_token_latency_seconds_count") == 4
    assert bench.pool.num_free == bench.pool.num_blocks


def test_stepper_reports_an_empty_cache_before_the_first_request(bench: Bench) -> None:
    """Regression: it reported 0 free blocks until then, as if the cache were full."""
    assert bench.sample("kv_cache_blocks", use="free") == bench.pool.num_blocks
    assert bench.sample("kv_cache_usage_ratio") == 0


def test_step_reports_self_and_cross_cache_use_separately(bench: Bench) -> None:
    bench.add("a", source_of(target_len=9, length=9), SamplingParams(max_new_tokens=4))
    bench.step()
    assert bench.sample("kv_cache_blocks", use="self") == blocks_for(5, BLOCK_SIZE)
    assert bench.sample("kv_cache_blocks", use="cross") == blocks_for(9, BLOCK_SIZE)
    assert bench.sample("num_requests_running") == 1
    bench.finish()
    assert bench.sample("kv_cache_blocks", use="free") == bench.pool.num_blocks
    assert bench.sample("kv_cache_usage_ratio") == 0
    assert bench.sample("num_requests_running") == 0


@pytest.mark.parametrize("seed", range(25))
def test_step_gives_each_request_of_a_random_mix_its_own_answer(loop: asyncio.AbstractEventLoop, seed: int) -> None:
    dice = random.Random(seed)
    bench = Bench(
        loop, max_rows=dice.randint(1, 7), num_blocks=dice.choice([17, 30, 200]), is_recurrent=dice.random() < 0.5
    )
    faults = {"encode": 0.0, "decode": 0.0}
    faults[dice.choice(list(faults))] = dice.choice([0.0, 0.05])

    def maybe(kind: str) -> None:
        if dice.random() < faults[kind]:
            raise RuntimeError(f"fault in {kind}")

    bench.runner.before_encode = lambda sources: maybe("encode")
    bench.runner.before_decode = lambda num_rows: maybe("decode")
    bench.runner.leaves_joining = dice.random() < 0.5
    for turn in range(120):
        if turn < 80:
            for i in range(dice.choice([0, 0, 1, 3])):
                source = source_of(
                    target_len=dice.randint(1, 25), length=dice.randint(2, 30), variant=dice.randint(0, 99)
                )
                params = SamplingParams(max_new_tokens=dice.choice([None, 1, 5, 20]))
                within_s = dice.choice([None, None, dice.uniform(0.5, 30.0)])
                prefix = (7,) * dice.choice([0, 0, 0, 1, 6])
                try:
                    bench.add(
                        f"{turn}.{i}", source, params, within_s=within_s, prefix=prefix, is_streamed=turn % 2 == 0
                    )
                except (QueueFull, DeadlineExceeded):
                    continue
        names = [sequence.request_id for sequence in bench.all]
        bench.step(*dice.sample(names, min(len(names), dice.choice([0, 0, 0, 1, 2]))))
        bench.clock.advance(dice.uniform(0.0, 0.5))
    bench.finish()
    assert bench.pool.num_free == bench.pool.num_blocks
    _check_outputs(bench)


def _check_outputs(bench: Bench) -> None:
    finished = 0
    for sequence in bench.all:
        event = bench.output(sequence)
        token_ids, reason = expected(bench, sequence)
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (event.token_ids, event.finish_reason) == (token_ids, reason)
            finished += 1
        assert event.token_ids == token_ids[: len(event.token_ids)]
        with pytest.raises(StopAsyncIteration):
            bench.loop.run_until_complete(stream_of(sequence).collect())
    assert finished > 0
    counted = [bench.sample("request_success_total", finished_reason=reason) or 0 for reason in ("stop", "length")]
    assert sum(counted) == finished


ENDS: dict[str, dict[str, Any]] = {
    "end token": {},
    "length": {"max_new_tokens": 5},
    "stop id": {"stop_ids": (EOS_ID + 2,), "logit_bias": ((EOS_ID + 2, 60.0),), "min_new_tokens": 4},
    "time limit": {"time_limit_s": 4.0},
    "no token left": {"allowed_ids": (9,), "suppressed_ids": (EOS_ID,), "no_repeat_ngram_size": 1},
    "several outputs": {"temperature": 1.0, "num_return_sequences": 3},
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("is_crowded", [False, True])
def test_answers_read_as_a_whole_have_the_tokens_of_streamed_ones(
    loop: asyncio.AbstractEventLoop, ends: str, is_crowded: bool
) -> None:
    params, events = SamplingParams(**ENDS[ends]), []
    for is_streamed in (True, False):
        bench = Bench(loop, num_blocks=SHORT_POOL if is_crowded else 64)
        for other in range(3 if is_crowded else 0):  # with too few blocks for all, some are preempted
            bench.add(str(other), source_of(target_len=40, length=4), is_streamed=other != 0)
        group = bench.add("asked", source_of(target_len=12), params, is_streamed=is_streamed)
        while bench.stepper.has_work:
            bench.step()
            bench.clock.advance(1.0)
        events.append(bench.outputs(group))
    streamed, whole = ([(one.token_ids, one.finish_reason, one.output_index) for one in event] for event in events)
    assert whole == streamed
    assert whole[0][0]


def test_preempted_answer_read_as_a_whole_keeps_its_tokens_at_its_time_limit(loop: asyncio.AbstractEventLoop) -> None:
    bench, params = Bench(loop, num_blocks=24), SamplingParams(time_limit_s=1000.0)
    groups = [bench.add(str(i), source_of(target_len=40, length=4), params, is_streamed=False) for i in range(4)]
    while not bench.sample("preemptions_total"):
        bench.step()
    (preempted,) = [group for group in groups if group.preempted_s is not None]
    (sequence,) = preempted.sequences
    assert sequence.row is None
    bench.clock.advance(1000.0)
    bench.finish()
    event = bench.output(preempted)
    assert event.finish_reason is FinishReason.TIME_LIMIT
    assert event.token_ids == sequence.produced == expected(bench, preempted)[0][: len(event.token_ids)]
    assert event.token_ids


def test_answers_read_as_a_whole_do_not_wake_the_loop_before_their_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(bench.loop, "call_soon_threadsafe", lambda *call: calls.append(call))
    bench.add("whole", source_of(target_len=9), is_streamed=False)
    bench.finish()
    assert len(calls) == 1
    bench.add("streamed", source_of(target_len=9))
    bench.finish()
    assert len(calls) == 1 + 9 + 1


def test_time_of_empty_rows_counts_only_while_requests_wait(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=4)
    bench.runner.before_decode = lambda num_rows: bench.clock.advance(1.0)
    for name in ("a", "b", "c"):
        bench.add(name, source_of(target_len=9, length=10))  # a step may encode only one of them
    bench.step()
    assert bench.sample("empty_row_seconds_total") == 3
    bench.clock.advance(0.5)
    bench.step()
    assert bench.sample("empty_row_seconds_total") == 3 + 3 * 0.5 + 2
    bench.finish()
    assert bench.sample("empty_row_seconds_total") == 3 + 3 * 0.5 + 2


def test_sources_are_encoded_early_while_many_requests_wait(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=4)
    runs: list[int] = []
    bench.runner.before_encode = lambda sources: runs.append(len(sources))
    groups = [bench.add(str(index), source_of(target_len=3, length=2, variant=index)) for index in range(12)]
    bench.step()
    assert runs == [6]  # four rows, and half as many early sources
    assert [group.state for group in groups[4:7]] == [
        SequenceState.RUNNING,
        SequenceState.RUNNING,
        SequenceState.WAITING,
    ]
    assert [group.num_held_rows for group in groups[:6]] == [1, 1, 1, 1, 0, 0]
    bench.step(groups[4].request_id)
    assert groups[4].state is SequenceState.FINISHED
    assert not groups[4].blocks
    bench.finish()
    assert sum(runs) == len(groups)
    for group in (*groups[:4], *groups[5:]):
        output = bench.output(group)
        assert (output.token_ids, output.finish_reason) == expected(bench, group)


def test_sources_are_not_encoded_early_for_one_of_several_callers(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, max_rows=4)
    runs: list[int] = []
    bench.runner.before_encode = lambda sources: runs.append(len(sources))
    for index in range(12):
        made = request_of(str(index), source_of(target_len=3, length=2, variant=index), arrival_s=bench.clock())
        bench.ask(changed(made, client=f"caller {index % 2}"))
    bench.step()
    assert runs == [4]
    bench.finish()


def test_step_feeds_a_prefix_beside_the_tokens_of_other_rows(bench: Bench) -> None:
    running = bench.add("running", source_of(target_len=12))
    bench.step()
    prefixed = bench.add("prefixed", source_of(target_len=9), prefix=(7, 8, 9))
    plain = bench.add("plain", source_of(target_len=2, variant=1))
    bench.step()
    bench.step()
    assert bench.runner.decoded_rows == [1, 3, 3]
    assert bench.runner.decoded_tokens == [1, 1 + 4 + 1, 3]
    bench.finish()
    event = bench.output(prefixed)
    assert (event.token_ids, event.finish_reason) == expected(bench, prefixed)
    assert (len(event.token_ids), event.num_generated) == (9 - 3, 10 - 3)
    for sequence in (running, plain):
        assert bench.output(sequence).token_ids == expected(bench, sequence)[0]


def test_step_counts_a_prefix_in_blocks_and_in_the_longest_target(bench: Bench) -> None:
    limited = bench.add("limited", source_of(target_len=60), SamplingParams(max_new_tokens=2), prefix=(7,) * 5)
    full = bench.add("full", source_of(target_len=60, variant=1), prefix=(7,) * 30)
    longest = bench.runner.facts.max_target_len
    assert limited.num_self_blocks == blocks_for(1 + 5 + 2, BLOCK_SIZE)
    assert (full.num_self_blocks, full.max_new_tokens) == (blocks_for(longest, BLOCK_SIZE), longest - 30)
    bench.finish()
    assert bench.output(limited).num_generated == 2
    event = bench.output(full)
    assert (event.finish_reason, event.num_generated) == (FinishReason.LENGTH, 2)


@pytest.mark.parametrize(
    ("prefix", "num_blocks", "message"),
    [
        ((7,) * 32, 64, "prefix is 32 tokens long; it must be 0 to 31 tokens long"),
        ((64,), 64, "prefix is token id 64"),
        ((7,) * 20, 5, "prefix is 20 tokens long; it must be at most 14 tokens long"),
        ((7,) * 12, 5, "max_new_tokens is None; it must be at most 3"),
    ],
)
def test_admission_refuses_a_prefix_that_could_never_run(
    loop: asyncio.AbstractEventLoop, prefix: tuple[int, ...], num_blocks: int, message: str
) -> None:
    bench = Bench(loop, num_blocks=num_blocks)
    with pytest.raises(InvalidArgument, match=message):
        bench.add("a", source_of(target_len=3), prefix=prefix)


def test_step_prefills_no_more_source_and_prefix_tokens_than_the_budget(bench: Bench) -> None:
    for i in range(3):
        bench.add(str(i), source_of(target_len=9, variant=i), prefix=(7,) * 4)  # 7 tokens each, of 16
    bench.step()
    assert bench.runner.decoded_tokens == [2 * 5]
    bench.finish()


SHORT_POOL, LARGE_POOL = 40, 200  # four rows of the longest source and target need 64 blocks
SOURCE = source_of(target_len=9, length=7)
GREEDY = request_of("a", SOURCE)


def run(bench: Bench, request: Request) -> tuple[int, int]:
    """Run one request alone. Return the reported number of blocks, and the most blocks in use before a graph ran."""
    used: list[int] = []
    bench.runner.before_encode = lambda sources: used.append(bench.pool.num_used)
    bench.runner.before_decode = lambda num_rows: used.append(bench.pool.num_used)
    group = bench.ask(request)
    bench.finish()
    (last,) = [event for event in bench.outputs(group) if event.is_last]
    assert last.error is None
    return last.cache_blocks, max(used)


def test_greedy_request_holds_blocks_of_its_source_and_written_positions(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """The begin token and nine words are written; the end token is not."""
    bench = Bench(loop, num_blocks=SHORT_POOL)
    reported, used = run(bench, GREEDY)
    assert reported == used == blocks_for(len(SOURCE), BLOCK_SIZE) + blocks_for(1 + 9, BLOCK_SIZE)


def test_greedy_request_holds_blocks_of_its_longest_target_in_a_large_pool(
    loop: asyncio.AbstractEventLoop,
) -> None:
    bench = Bench(loop, num_blocks=LARGE_POOL)
    longest = 12
    request = dataclasses.replace(GREEDY, params=SamplingParams(max_new_tokens=longest))
    reported, used = run(bench, request)
    assert reported == used == blocks_for(len(SOURCE), BLOCK_SIZE) + blocks_for(1 + longest, BLOCK_SIZE)


@pytest.mark.parametrize("num_blocks", [SHORT_POOL, LARGE_POOL])
@pytest.mark.parametrize(
    "asked",
    [
        dataclasses.replace(GREEDY, prefix_ids=(5, 6, 7)),
        dataclasses.replace(GREEDY, params=SamplingParams(beam_width=4, max_new_tokens=9)),
        dataclasses.replace(GREEDY, params=SamplingParams(temperature=1.0, num_return_sequences=3, max_new_tokens=9)),
        scored(GREEDY, (9, 8, 7, 6, 5, 4)),
        Request(task=Task.EMBED, arrival=Arrival(request_id="a", arrival_s=0.0), source_ids=SOURCE),
    ],
    ids=["prefix", "beams", "samples", "score", "embed"],
)
def test_reported_blocks_are_the_most_that_a_request_alone_takes_out_of_the_pool(
    loop: asyncio.AbstractEventLoop, asked: Request, num_blocks: int
) -> None:
    bench = Bench(loop, num_blocks=num_blocks, reads_history=True)
    reported, used = run(bench, asked)
    assert reported == used > 0


def test_recurrent_row_holds_one_block_for_a_target_of_any_length(loop: asyncio.AbstractEventLoop) -> None:
    params = SamplingParams(beam_width=4, max_new_tokens=20, ignore_eos=True)
    for request, num_rows in ((GREEDY, 1), (dataclasses.replace(GREEDY, params=params, prefix_ids=(5,) * 9), 4)):
        reported, used = run(Bench(loop, reads_history=True, is_recurrent=True), request)
        assert reported == used == blocks_for(len(SOURCE), BLOCK_SIZE) + num_rows


def test_preempted_request_reports_no_more_blocks_than_alone(loop: asyncio.AbstractEventLoop) -> None:
    """It gives all its blocks back, and takes them again."""
    source = source_of(target_len=40, length=4)
    alone, _ = run(Bench(loop, num_blocks=SHORT_POOL), request_of("a", source))
    bench = Bench(loop, num_blocks=alone + 8)
    groups = [bench.add(str(index), source) for index in range(4)]
    bench.finish()
    assert bench.sample("preemptions_total")
    for group in groups:
        event = bench.output(group)
        assert (event.finish_reason, event.cache_blocks) == (FinishReason.LENGTH, alone)


def test_request_that_never_ran_reports_no_blocks(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop)
    group = bench.ask(GREEDY)
    bench.step("a")
    assert bench.output(group).cache_blocks == 0
