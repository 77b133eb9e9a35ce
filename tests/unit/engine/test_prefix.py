"""Target prefixes: fed in the first step of a sequence, and counted by admission and by the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import FinishReason
from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.cache_geometry import blocks_for
from tests.fakes import source_of
from tests.unit.engine.step_bench import BLOCK_SIZE, Bench, expected


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def bench(loop: asyncio.AbstractEventLoop) -> Bench:
    return Bench(loop)


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
