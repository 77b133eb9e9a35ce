"""The engine's thread, and engines of several lanes, around fake models that may fail; no test sleeps."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import DeadlineExceeded, EngineFault, InvalidArgument, QueueFull, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import FinishReason, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import MAX_FAILED_STEPS, Engine
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from tests.fakes import EOS_ID, FakeRunner, source_of, tokens_of
from tests.unit.engine.engine_bench import TIMEOUT_S, Bench, Gate, arrive, read

ENDLESS = source_of(target_len=60)


@pytest.fixture
def endless() -> Iterator[Bench]:
    bench = Bench(FakeRunner(max_rows=4, max_target_len=1_000_000, block_size=4096))
    bench.runner.overrides[ENDLESS] = np.eye(1, bench.runner.facts.vocab_size, 9, dtype=np.float32)[0]
    bench.engine.start()
    yield bench
    bench.engine.stop()
    assert bench.engine.num_free_blocks == bench.engine.num_blocks


async def test_engine_answers_equal_those_of_the_model(bench: Bench) -> None:
    source = source_of(target_len=5)
    events = await read(bench.submit("a", source))
    assert (tokens_of(events), events[-1].finish_reason) == bench.runner.answer(source)
    assert events[-1].num_generated == 6
    assert all(event.finish_reason is None for event in events[:-1])


async def test_engine_answers_of_a_batch_equal_those_of_each_request_alone(bench: Bench) -> None:
    sources = [source_of(target_len=1 + i * 5 % 13, length=2 + i % 4, variant=i) for i in range(40)]
    streams = [bench.submit(str(i), source) for i, source in enumerate(sources)]
    outputs = await asyncio.gather(*(read(stream) for stream in streams))
    for source, events in zip(sources, outputs, strict=True):
        assert (tokens_of(events), events[-1].finish_reason) == bench.runner.answer(source)
    assert bench.engine.num_running == 0


async def test_engine_lets_a_request_join_at_the_next_step(bench: Bench, gate: Gate) -> None:
    first = bench.submit("first", source_of(target_len=9))
    await arrive(gate)
    second = bench.submit("second", source_of(target_len=2))
    gate.step()
    await arrive(gate)
    gate.open()
    await read(second)
    await read(first)
    assert bench.runner.decoded_rows[:2] == [1, 2]


async def test_engine_frees_blocks_of_a_cancelled_request_within_one_step(bench: Bench, gate: Gate) -> None:
    kept = bench.submit("kept", source_of(target_len=3))
    cancelled = bench.submit("cancelled", source_of(target_len=20))
    await arrive(gate)
    gate.step()
    await arrive(gate)
    bench.engine.cancel("cancelled")
    gate.step()
    await arrive(gate)
    assert bench.engine.num_running == 1
    gate.open()
    events = await read(cancelled)
    assert events[-1].finish_reason is FinishReason.CANCELLED
    assert tokens_of(events) == bench.runner.answer(source_of(target_len=20))[0][: events[-1].num_generated]
    assert tokens_of(await read(kept)) == bench.runner.answer(source_of(target_len=3))[0]
    assert bench.sample("cancellations_total", stage="running", cause="client") == 1


async def test_engine_ends_a_waiting_request_when_cancelled(bench: Bench, gate: Gate) -> None:
    running = [bench.submit(f"running{i}", source_of(target_len=4)) for i in range(4)]
    await arrive(gate)
    waiting = bench.submit("waiting", source_of(target_len=4))
    bench.engine.cancel("waiting")
    gate.open()
    events = await read(waiting)
    assert [event.finish_reason for event in events] == [FinishReason.CANCELLED]
    assert not tokens_of(events)
    for stream in running:
        await read(stream)
    assert len(bench.runner.encoded) <= 4
    assert bench.sample("cancellations_total", stage="waiting", cause="client") == 1


async def test_engine_ignores_cancel_of_an_unknown_or_finished_request(bench: Bench) -> None:
    bench.engine.cancel("never seen")
    await read(bench.submit("done", source_of(target_len=2)))
    bench.engine.cancel("done")
    events = await read(bench.submit("next", source_of(target_len=2)))
    assert events[-1].finish_reason is FinishReason.STOP


async def test_engine_ends_only_requests_of_a_faulty_encoding(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    poison = source_of(target_len=4, length=7)

    def fail_on_poison(sources: Sequence[Sequence[int]]) -> None:
        if poison in sources:
            raise RuntimeError("out of memory")

    bench.runner.before_encode = fail_on_poison
    good, bad = bench.submit("good", source_of(target_len=4)), bench.submit("bad", poison)
    events = await read(bad)
    assert events[-1].finish_reason is FinishReason.ERROR
    assert isinstance(events[-1].error, EngineFault)
    assert "out of memory" not in str(events[-1].error)
    assert tokens_of(await read(good)) == bench.runner.answer(source_of(target_len=4))[0]
    assert "out of memory" in caplog.text


async def test_engine_continues_after_a_faulty_decoder_step(bench: Bench) -> None:
    faults = iter([RuntimeError("bad step")])

    def fail_once(num_rows: int) -> None:
        if fault := next(faults, None):
            raise fault

    bench.runner.before_decode = fail_once
    events = await read(bench.submit("first", source_of(target_len=4)))
    assert events[-1].finish_reason is FinishReason.ERROR
    events = await read(bench.submit("second", source_of(target_len=4)))
    assert events[-1].finish_reason is FinishReason.STOP
    assert bench.engine.is_alive


async def test_engine_drain_finishes_accepted_requests_and_refuses_new_ones(bench: Bench, gate: Gate) -> None:
    streams = [bench.submit(str(i), source_of(target_len=4)) for i in range(6)]
    await arrive(gate)
    draining = asyncio.create_task(asyncio.to_thread(bench.engine.drain, TIMEOUT_S))
    while True:  # until drain refuses requests
        try:
            streams.append(bench.submit(str(len(streams)), source_of(target_len=4)))
        except Unavailable:
            break
        except QueueFull:  # the draining thread has not started yet
            pass
        await asyncio.sleep(0)
    gate.open()
    assert await draining
    for stream in streams:
        assert (await read(stream))[-1].finish_reason is FinishReason.STOP
    assert not bench.engine.is_alive


async def test_engine_drain_ends_remaining_requests_after_the_timeout(endless: Bench) -> None:
    stream = endless.submit("slow", ENDLESS)
    assert not await asyncio.to_thread(endless.engine.drain, 0.0)
    events = await read(stream)
    assert events[-1].finish_reason is FinishReason.ERROR
    assert isinstance(events[-1].error, Unavailable)


async def test_engine_stop_ends_running_and_waiting_requests(endless: Bench) -> None:
    streams = [endless.submit(str(i), ENDLESS) for i in range(7)]
    await asyncio.to_thread(endless.engine.stop)
    for stream in streams:
        events = await read(stream)
        assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.ERROR]
    with pytest.raises(Unavailable):
        endless.submit("late", ENDLESS)


async def test_engine_ends_a_running_request_when_its_deadline_passes(endless: Bench) -> None:
    events = await read(endless.submit("slow", ENDLESS, within_s=0.05))
    assert events[-1].finish_reason is FinishReason.DEADLINE
    assert isinstance(events[-1].error, DeadlineExceeded)


async def test_engine_ends_every_request_when_its_thread_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench.metrics, "decoded", die)
    events = await read(bench.submit("a", source_of(target_len=2)))
    assert isinstance(events[-1].error, EngineFault)
    bench.engine._lanes[0].thread.join(TIMEOUT_S)
    assert not bench.engine.is_alive
    with pytest.raises(Unavailable):
        bench.submit("b", source_of(target_len=2))


async def test_engine_refuses_a_request_it_could_never_run() -> None:
    bench = Bench(FakeRunner(max_rows=2, block_size=4, num_blocks=4))
    bench.engine.start()
    cases = [
        ((), None, "source"),
        (source_of(target_len=1, length=33), None, "source"),
        ((5, 64), None, "source"),
        ((5, -1), None, "source"),
        (source_of(target_len=1, length=20), None, "source"),
        (source_of(target_len=1, length=8), SamplingParams(max_new_tokens=12), "max_new_tokens"),
    ]
    for source, params, field in cases:
        with pytest.raises(InvalidArgument) as refusal:
            bench.submit("x", source, params)
        assert refusal.value.field == field
    fits = await read(bench.submit("x", source_of(target_len=9, length=8), SamplingParams(max_new_tokens=7)))
    assert fits[-1].finish_reason is FinishReason.LENGTH
    bench.engine.stop()


async def test_engine_refuses_a_deadline_that_has_passed(bench: Bench) -> None:
    with pytest.raises(DeadlineExceeded):
        bench.submit("late", source_of(target_len=2), within_s=-1.0)
    assert bench.sample("deadline_misses_total", stage="submit") == 1


async def test_engine_refuses_an_id_that_is_still_in_use(bench: Bench, gate: Gate) -> None:
    stream = bench.submit("same", source_of(target_len=2))
    await arrive(gate)
    with pytest.raises(InvalidArgument, match="request_id"):
        bench.submit("same", source_of(target_len=2))
    gate.open()
    await read(stream)


async def test_engine_refuses_when_the_queue_is_full() -> None:
    bench = Bench(FakeRunner(max_rows=1), EngineLimits(max_num_seqs=1, max_queued_requests=2))
    gate = Gate()
    bench.runner.before_decode = gate
    bench.engine.start()
    streams = [bench.submit("running", source_of(target_len=2))]
    await arrive(gate)
    streams += [bench.submit(f"waiting{i}", source_of(target_len=2)) for i in range(2)]
    with pytest.raises(QueueFull) as refusal:
        bench.submit("refused", source_of(target_len=2))
    assert refusal.value.retry_after_s > 0
    assert bench.sample("num_requests_waiting") == 2
    gate.open()
    for stream in streams:
        assert (await read(stream))[-1].finish_reason is FinishReason.STOP
    await read(bench.submit("refused", source_of(target_len=2)))
    bench.engine.stop()


async def test_engine_refuses_before_start() -> None:
    bench = Bench(FakeRunner())
    with pytest.raises(Unavailable):
        bench.submit("early", source_of(target_len=2))
    assert bench.engine.drain(0.0)


def test_engine_names_the_setting_that_the_runner_cannot_serve() -> None:
    metrics = Metrics(MetricFamilies(CollectorRegistry()), "fake")
    with pytest.raises(ValueError, match="max_num_seqs is 9"):
        Engine(FakeRunner(max_rows=8), EngineLimits(max_num_seqs=9), metrics)


async def test_engine_cancels_requests_whose_event_loop_is_closed(bench: Bench) -> None:
    async def submit_and_leave() -> None:
        bench.submit("orphan", source_of(target_len=30))

    gate = Gate()
    bench.runner.before_decode = gate
    await asyncio.to_thread(asyncio.run, submit_and_leave())
    await arrive(gate)
    gate.open()
    events = await read(bench.submit("next", source_of(target_len=31)))
    assert events[-1].finish_reason is FinishReason.LENGTH or events[-1].finish_reason is FinishReason.STOP
    assert bench.sample("cancellations_total", stage="running", cause="lost_loop") == 1


async def test_engine_frees_its_cache_when_no_request_came_for_a_while(bench: Bench) -> None:
    source = source_of(target_len=5)
    await read(bench.submit("a", source))
    bench.engine.free_idle_cache()  # requests came since the last call, of which there was none
    assert bench.runner.num_cache_frees == 0
    for _ in range(3):
        bench.engine.free_idle_cache()
    assert bench.runner.num_cache_frees == 1
    assert tokens_of(await read(bench.submit("b", source))) == bench.runner.answer(source)[0]
    bench.engine.free_idle_cache()
    assert bench.runner.num_cache_frees == 1
    bench.engine.free_idle_cache()
    assert bench.runner.num_cache_frees == 2


async def test_engine_keeps_its_cache_while_a_request_uses_it(bench: Bench, gate: Gate) -> None:
    source = source_of(target_len=5)
    stream = bench.submit("a", source)
    await arrive(gate)
    for _ in range(3):
        bench.engine.free_idle_cache()
    assert bench.runner.num_cache_frees == 0
    gate.open()
    assert tokens_of(await read(stream)) == bench.runner.answer(source)[0]


async def test_engine_stops_when_its_steps_and_the_test_run_of_the_model_fail(bench: Bench) -> None:
    def break_down(num_rows: int) -> None:
        raise RuntimeError("the model is broken")

    bench.runner.before_decode = break_down
    for index in range(MAX_FAILED_STEPS):
        assert bench.engine.is_alive
        events = await read(bench.submit(str(index), source_of(target_len=2)))
        assert isinstance(events[-1].error, EngineFault)
    await asyncio.to_thread(bench.engine._lanes[0].thread.join, TIMEOUT_S)
    assert not bench.engine.is_alive
    with pytest.raises(Unavailable):
        bench.submit("late", source_of(target_len=2))


async def test_engine_survives_requests_that_fail_one_after_the_other(bench: Bench) -> None:
    poison = source_of(target_len=2, length=7)

    def fail(sources: Sequence[Sequence[int]]) -> None:
        if any(len(source) == len(poison) for source in sources):
            raise RuntimeError("too much for one")

    bench.runner.before_encode = fail
    for index in range(3 * MAX_FAILED_STEPS):
        events = await read(bench.submit(str(index), poison))
        assert isinstance(events[-1].error, EngineFault)
    events = await read(bench.submit("fine", source_of(target_len=2)))
    assert events[-1].finish_reason is FinishReason.STOP


async def test_engine_counts_steps_with_non_finite_logits_as_failed(bench: Bench) -> None:
    nan = np.full(bench.runner.facts.vocab_size, np.nan, np.float32)
    sources = [source_of(target_len=2, variant=index) for index in range(MAX_FAILED_STEPS)]
    bench.runner.overrides = dict.fromkeys([*sources, (EOS_ID,)], nan)  # with the source of the model's own test
    for index, source in enumerate(sources):
        assert bench.engine.is_alive
        await read(bench.submit(str(index), source))
    await asyncio.to_thread(bench.engine._lanes[0].thread.join, TIMEOUT_S)
    assert not bench.engine.is_alive


async def test_engine_reports_an_error_to_every_waiting_caller_when_it_is_drained_while_it_hangs(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("antiphon.engine.engine._STOP_PATIENCE_S", 0.01)
    streams = [bench.submit(str(index), source_of(target_len=9)) for index in range(6)]
    await arrive(gate)
    assert not await asyncio.to_thread(bench.engine.drain, 0.01)
    assert bench.engine.is_alive
    for stream in streams:
        events = await read(stream)
        assert [type(event.error) for event in events if event.is_last] == [EngineFault]
    assert "the engine hangs" in caplog.text
    gate.open()  # for the fixture, which sees that every block is free


async def test_engine_reports_an_error_to_every_waiting_caller_when_its_cleanup_fails_too(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bench.submit("a", source_of(target_len=9))
    await arrive(gate)

    def die(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench.metrics, "decoded", die)
    monkeypatch.setattr(bench.metrics, "occupied", die)
    gate.open()
    assert isinstance((await read(stream))[-1].error, EngineFault)
    await asyncio.to_thread(bench.engine._lanes[0].thread.join, TIMEOUT_S)
    monkeypatch.undo()
    bench.engine._lanes[0].stepper.end_all(lambda: EngineFault("for the fixture, which sees that every block is free"))


ROWS = 8


def lanes(num_lanes: int, first: FakeRunner) -> Bench:
    return Bench(first, further=[first.sibling() for _ in range(num_lanes - 1)])


@pytest.fixture
def two() -> Iterator[Bench]:
    bench = lanes(2, FakeRunner(max_rows=ROWS))
    bench.engine.start()
    yield bench
    bench.engine.stop()
    assert bench.engine.num_free_blocks == bench.engine.num_blocks


@pytest.fixture
def gates(two: Bench) -> Iterator[list[Gate]]:
    """Block each lane's decoder by a gate of its own."""
    made = [Gate() for _ in two.runners]
    for runner, gate in zip(two.runners, made, strict=True):
        runner.before_decode = gate
    yield made
    for gate in made:
        gate.open()


async def arrive_any(gates: list[Gate]) -> int:
    """Wait until some lane has arrived at its gate; return its index."""
    arrivals = [asyncio.create_task(asyncio.to_thread(gate.arrived.acquire, timeout=TIMEOUT_S)) for gate in gates]
    await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    (index,) = (index for index, arrival in enumerate(arrivals) if arrival.done())
    for other, gate in enumerate(gates):
        if other != index:
            gate.arrived.release()  # ends the thread that still waits
    await asyncio.gather(*arrivals)
    return index


async def test_second_request_runs_while_the_step_of_the_first_is_held(two: Bench, gates: list[Gate]) -> None:
    held = two.submit("held", source_of(target_len=3))
    lane = await arrive_any(gates)
    gates[1 - lane].open()
    source = source_of(target_len=9)
    assert tokens_of(await read(two.submit("other", source))) == two.runner.answer(source)[0]
    assert two.engine.num_running == 1
    gates[lane].open()
    assert tokens_of(await read(held)) == two.runner.answer(source_of(target_len=3))[0]


async def test_rows_are_divided_equally_among_lanes_while_requests_wait(two: Bench, gates: list[Gate]) -> None:
    decoded: list[list[int]] = [[] for _ in gates]

    def watch(gate: Gate, rows: list[int]) -> Callable[[int], None]:
        def note(num_rows: int) -> None:
            gate(num_rows)
            if two.engine.num_waiting:
                rows.append(num_rows)

        return note

    for runner, gate, rows in zip(two.runners, gates, decoded, strict=True):
        runner.before_decode = watch(gate, rows)
    streams = [two.submit(str(index), source_of(target_len=20, variant=index)) for index in range(3 * ROWS)]
    for gate in gates:
        await arrive(gate)
    for gate in gates:
        gate.open()
    for stream in streams:
        await read(stream)
    assert list(map(max, decoded)) == [ROWS // 2, ROWS // 2]


async def test_cancellation_reaches_the_lane_of_the_request(two: Bench, gates: list[Gate]) -> None:
    streams = [two.submit(name, source_of(target_len=20)) for name in ("a", "b")]
    for gate in gates:
        await arrive(gate)
    two.engine.cancel("a")
    two.engine.cancel("b")
    for gate in gates:
        gate.open()
    for stream in streams:
        events = await read(stream)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].num_generated <= 1  # the token of the step that was held
    assert two.engine.num_free_blocks == two.engine.num_blocks


async def test_beam_search_of_all_rows_runs_in_one_lane(two: Bench) -> None:
    one = lanes(1, FakeRunner(max_rows=ROWS, reads_history=True))
    both = lanes(2, FakeRunner(max_rows=ROWS, reads_history=True))
    params = SamplingParams(beam_width=ROWS, max_new_tokens=12)
    found = []
    for bench in (one, both):
        bench.engine.start()
        found.append(tokens_of(await read(bench.submit("beams", source_of(target_len=9), params))))
        bench.engine.stop()
    assert found[0] == found[1]


async def test_fault_of_one_lane_ends_the_requests_of_all(
    two: Bench, gates: list[Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    streams = [two.submit(name, source_of(target_len=20)) for name in ("a", "b")]
    for gate in gates:
        await arrive(gate)
    monkeypatch.setattr(two.metrics, "decoded", die)
    answers = [asyncio.create_task(read(stream)) for stream in streams]
    gates[0].open()
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    gates[1].open()
    for events in await asyncio.gather(*answers):
        (event,) = [event for event in events if event.is_last]
        assert isinstance(event.error, EngineFault)
    with pytest.raises(Unavailable):
        two.submit("later", source_of(target_len=2))


async def test_drain_finishes_the_requests_of_every_lane(two: Bench) -> None:
    streams = [two.submit(str(index), source_of(target_len=10, variant=index)) for index in range(40)]
    drained = asyncio.create_task(asyncio.to_thread(two.engine.drain, TIMEOUT_S))
    for index, stream in enumerate(streams):
        assert tokens_of(await read(stream)) == two.runner.answer(source_of(target_len=10, variant=index))[0]
    assert await drained


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [None, 9])
async def test_answers_do_not_depend_on_the_number_of_lanes(num_lanes: int, num_blocks: int | None) -> None:
    """Random requests, some cancelled; with few blocks requests are preempted and go on, also in another lane."""
    dice = random.Random(7)
    bench = lanes(num_lanes, FakeRunner(max_rows=ROWS, reads_history=True, num_blocks=num_blocks))
    alone = Bench(FakeRunner(max_rows=ROWS, reads_history=True))
    for one in (bench, alone):
        one.engine.start()
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, seed=4, num_return_sequences=3),
        SamplingParams(beam_width=2),
    ]
    for turn in range(3):
        asked = [(f"{turn}-{index}", source_of(target_len=dice.randint(1, 28), variant=index)) for index in range(30)]
        params = {name: dice.choice(kinds if num_blocks is None else kinds[:2]) for name, _ in asked}
        streams = {name: bench.submit(name, source, params[name]) for name, source in asked}
        dropped = {name for name in streams if dice.random() < 0.2}
        for name in dropped:
            bench.engine.cancel(name)
        for name, source in asked:
            found = by_output(await read(streams[name]))
            if name not in dropped:
                assert found == by_output(await read(alone.submit(name, source, params[name])))
    for one in (bench, alone):
        one.engine.stop()
        assert one.engine.num_free_blocks == one.engine.num_blocks
    assert bench.sample("num_requests_running") == 0


def by_output(events: list[TokenEvent]) -> dict[int, tuple[list[int], FinishReason | None]]:
    """Return the tokens and the finish reason of each output."""
    outputs: dict[int, tuple[list[int], FinishReason | None]] = {}
    for event in events:
        tokens, _ = outputs.get(event.output_index, ([], None))
        outputs[event.output_index] = ([*tokens, *event.token_ids], event.finish_reason)
    return outputs
