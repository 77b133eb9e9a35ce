"""Load of twice the capacity on a simulated clock: the answers in time stay close to the best rate."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest

from antiphon.domain.errors import DeadlineExceeded, QueueFull, Unavailable
from antiphon.domain.request import ANSWERED
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.sequences.sequence import SequenceState
from tests.fakes import source_of
from tests.unit.engine.step_bench import Bench

STEP_S = 0.01
DURATION_S = 8.0
RATE = 100.0  # twice what four rows of about eight steps each can serve


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def answered_per_second(loop: asyncio.AbstractEventLoop, within_s: float | None) -> float:
    """Serve Poisson arrivals; return the rate of answers in the second half that met their deadlines, if any."""
    dice, bench = random.Random(0), Bench(loop)
    bench.runner.before_decode = lambda num_rows: bench.clock.advance(STEP_S)
    start_s = next_s = bench.clock()
    answered = {False: 0, True: 0}  # by whether it is the second half
    while (passed_s := bench.clock() - start_s) < DURATION_S:
        while next_s <= bench.clock():
            next_s += dice.expovariate(RATE)
            name, source = str(next_s), source_of(target_len=dice.randint(3, 11), length=8)
            with contextlib.suppress(QueueFull, DeadlineExceeded):
                bench.add(name, source, SamplingParams(max_new_tokens=12), within_s=within_s)
        running = [group for group in bench.all if group.state is not SequenceState.FINISHED]
        bench.stepper.step()
        ended = [group for group in running if group.stream.end_reason in ANSWERED]
        answered[passed_s >= DURATION_S / 2] += len(ended)
        bench.all = [group for group in bench.all if group.state is not SequenceState.FINISHED]
    bench.stepper.end_all(lambda: Unavailable("the end"))
    assert bench.pool.num_free == bench.pool.num_blocks
    return answered[True] / (DURATION_S / 2)


def test_goodput_under_deadlines_stays_within_a_tenth_of_the_best(loop: asyncio.AbstractEventLoop) -> None:
    best = answered_per_second(loop, None)
    assert best < 0.6 * RATE  # the load exceeds the capacity
    for within_s in (0.4, 1.0):
        assert answered_per_second(loop, within_s) >= 0.9 * best
