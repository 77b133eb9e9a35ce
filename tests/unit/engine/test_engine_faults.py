"""Ends of requests and of the engine when the model, or the engine itself, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from antiphon.domain.errors import EngineFault, Unavailable
from antiphon.domain.request import FinishReason
from antiphon.engine.engine import MAX_FAILED_STEPS
from tests.fakes import EOS_ID, source_of
from tests.unit.engine.engine_bench import TIMEOUT_S, Bench, Gate, arrive, read


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
