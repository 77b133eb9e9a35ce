"""Most cache blocks that a request held at one time, compared with the use of the pool by the request alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest

from antiphon.domain.request import Arrival, FinishReason, Request, Task
from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.cache_geometry import blocks_for
from tests.fakes import request_of, scored, source_of
from tests.unit.engine.step_bench import BLOCK_SIZE, Bench

SHORT_POOL, LARGE_POOL = 40, 200  # four rows of the longest source and target need 64 blocks
SOURCE = source_of(target_len=9, length=7)
GREEDY = request_of("a", SOURCE)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


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


def test_greedy_request_holds_blocks_of_its_source_and_of_the_positions_that_it_writes(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """The begin token and nine words are written; the end token is not."""
    bench = Bench(loop, num_blocks=SHORT_POOL)
    reported, used = run(bench, GREEDY)
    assert reported == used == blocks_for(len(SOURCE), BLOCK_SIZE) + blocks_for(1 + 9, BLOCK_SIZE)


def test_greedy_request_holds_blocks_of_its_longest_target_when_the_pool_cannot_run_short(
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
