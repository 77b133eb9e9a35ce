"""The engine's thread: real threads and a real event loop around the fake model; no test sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from antiphon.domain.errors import DeadlineExceeded, EngineFault, InvalidArgument, QueueFull, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import FinishReason
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.observability.metrics.metric_families import MetricFamilies
from tests.fakes import FakeRunner, source_of, tokens_of
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


async def test_engine_frees_blocks_of_a_running_request_within_one_step_when_cancelled(
    bench: Bench, gate: Gate
) -> None:
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


async def test_engine_ends_only_the_requests_of_a_faulty_encoder_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
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
