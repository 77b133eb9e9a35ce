"""Engines of several lanes: real threads around fake models that share the cache blocks; no test sleeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from antiphon.domain.errors import EngineFault, Unavailable
from antiphon.domain.request import FinishReason, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from tests.fakes import FakeRunner, source_of, tokens_of
from tests.unit.engine.engine_bench import TIMEOUT_S, Bench, Gate, arrive, read

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
