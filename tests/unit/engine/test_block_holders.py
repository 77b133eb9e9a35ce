"""Blocks of running requests, copied while the engine's threads are held in the middle of a step."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.kv_cache import BlockHolder
from antiphon.ops.cache_geometry import blocks_for
from tests.fakes import FakeRunner, source_of
from tests.unit.engine.engine_bench import Bench, Gate, arrive, read

BLOCK_SIZE, NUM_BLOCKS = 4, 60
SEARCH = SamplingParams(beam_width=4, max_new_tokens=20, ignore_eos=True)
SAMPLES = SamplingParams(temperature=1.0, num_return_sequences=2, max_new_tokens=12)


@pytest.fixture
def held() -> Iterator[tuple[Bench, Gate]]:
    """Run an engine whose pool may run short, behind a gate before each step of the decoder."""
    runner = FakeRunner(max_rows=8, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, reads_history=True)
    gate = runner.before_decode = Gate()
    bench = Bench(runner)
    bench.engine.start()
    yield bench, gate
    gate.open()
    bench.engine.stop()


def check(holders: Sequence[BlockHolder], bench: Bench) -> None:
    """Check that every block belongs to one request, or is free."""
    blocks = [block for holder in holders for block in (*holder.source_blocks, *holder.target_blocks)]
    assert len(set(blocks)) == len(blocks)
    assert set(blocks) <= set(range(NUM_BLOCKS))
    assert len(blocks) + bench.engine.num_free_blocks == bench.engine.num_blocks == NUM_BLOCKS
    tickets = [holder.ticket for holder in holders]
    assert tickets == sorted(set(tickets))
    assert all(ticket >= 1 for ticket in tickets)


async def test_every_block_has_one_holder_or_is_free_after_every_step(held: tuple[Bench, Gate]) -> None:
    bench, gate = held
    assert bench.engine.block_holders() == []
    asked: list[tuple[tuple[int, ...], SamplingParams | None]] = [
        (source_of(target_len=3, length=5), None),
        (source_of(target_len=20, length=9), SEARCH),
        (source_of(target_len=20, length=4), SAMPLES),
        (source_of(target_len=20, length=6), None),
    ]
    streams = [bench.submit(str(index), source, params) for index, (source, params) in enumerate(asked)]
    seen: set[int] = set()
    reading = asyncio.gather(*(read(stream) for stream in streams))
    while not reading.done():
        arriving = asyncio.ensure_future(arrive(gate))
        await asyncio.wait((arriving, reading), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            gate.arrived.release()  # ends the thread that still waits
        else:
            holders = await asyncio.to_thread(bench.engine.block_holders)
            check(holders, bench)
            seen |= {holder.ticket for holder in holders}
            for holder in holders:  # tickets are given in the order of submission
                source, _ = asked[holder.ticket - 1]
                assert len(holder.source_blocks) == blocks_for(len(source), BLOCK_SIZE)
            gate.step()
        await arriving
    await reading
    assert seen == {1, 2, 3, 4}
    assert bench.engine.block_holders() == []


async def test_holder_has_the_blocks_of_its_source_and_of_its_longest_row(held: tuple[Bench, Gate]) -> None:
    bench, gate = held
    stream = bench.submit("a", source_of(target_len=9, length=9))
    await arrive(gate)
    (holder,) = bench.engine.block_holders()
    assert holder.ticket == 1
    assert len(holder.source_blocks) == blocks_for(9, BLOCK_SIZE)
    assert len(holder.target_blocks) == 1  # the begin token, and room for three more
    for _ in range(BLOCK_SIZE):
        gate.step()
        await arrive(gate)
    (later,) = bench.engine.block_holders()
    assert (later.ticket, later.source_blocks) == (1, holder.source_blocks)
    assert len(later.target_blocks) == 2
    assert {*holder.target_blocks} < {*later.target_blocks}
    assert len(holder.target_blocks) == 1  # a copy
    gate.open()
    await read(stream)


async def test_snapshot_has_the_requests_of_all_lanes() -> None:
    first = FakeRunner(max_rows=4, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    bench = Bench(first, further=[first.sibling()])
    gates = [Gate(), Gate()]
    for runner, gate in zip(bench.runners, gates, strict=True):
        runner.before_decode = gate
    bench.engine.start()
    try:
        streams = [bench.submit(str(index), source_of(target_len=9, variant=index)) for index in range(4)]
        await asyncio.gather(*(arrive(gate) for gate in gates))
        holders = bench.engine.block_holders()
        check(holders, bench)
        assert len(holders) == bench.engine.num_running >= 2
        for gate in gates:
            gate.open()
        await asyncio.gather(*(read(stream) for stream in streams))
    finally:
        for gate in gates:
            gate.open()
        bench.engine.stop()
    assert bench.engine.block_holders() == []
