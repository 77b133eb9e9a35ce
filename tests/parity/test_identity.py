"""The same answer alone or in a crowd: every request's tokens and log-probabilities, bit by bit.

Random mixes of requests go through the engine's steps over native graphs: any lengths, greedy and sampled, with and
without prefixes, joining and leaving when the dice say so, some cancelled. Each is then run alone, with one thread.
ANTIPHON_IDENTITY_ROUNDS mixes are drawn for each graph set and number of threads; `make soak` draws many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections.abc import Iterator
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from antiphon.model.bundle import Bundle, Precision
from antiphon.service.admission import AdmissionLimits, admit
from antiphon.service.kv_cache import BlockPool
from antiphon.service.metrics import Metrics
from antiphon.service.native_runner import NativeRunner
from antiphon.service.request import MAX_SEED, FinishReason, Request, SamplingParams
from antiphon.service.request_queue import QueueLimits, RequestQueue
from antiphon.service.runner import DecodeBatch, Draw, Runner
from antiphon.service.scheduler import SchedulerLimits
from antiphon.service.sequence import Sequence
from antiphon.service.step import StepParts, Stepper
from antiphon.service.stream import OutputStream
from tests.fakes import FakeClock, request_of

ROUNDS = int(os.environ.get("ANTIPHON_IDENTITY_ROUNDS") or 8)
MAX_ROWS = 40
NUM_REQUESTS = 60
Choices = list[tuple[int, float]]


class Recorder:
    """A runner that asks for the log-probability of every chosen token, and notes both by request.

    A row's request is the live one that holds its first cross block.
    """

    def __init__(self, runner: NativeRunner, live: dict[str, Sequence]) -> None:
        self._runner = runner
        self._live = live
        self.choices: dict[str, Choices] = {}
        self.num_mixed_steps = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def decode(self, batch: DecodeBatch) -> Draw:
        drawn = self._runner.decode(dataclasses.replace(batch, num_logprobs=0))
        held = {s.cross_block_table[0]: name for name, s in self._live.items() if s.cross_block_table}
        chosen = zip(drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True)
        for block, choice in zip(batch.cross_tables[:, 0].tolist(), chosen, strict=True):
            self.choices.setdefault(held[block], []).append(choice)
        self.num_mixed_steps += batch.num_tokens > batch.num_rows > 1
        return drawn


class Crowd:
    """An engine's steps, one by one, over a runner whose pool nobody else uses meanwhile."""

    def __init__(self, runner: NativeRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.live: dict[str, Sequence] = {}
        self.sequences: dict[str, Sequence] = {}
        self.recorder = Recorder(runner, self.live)
        self.pool = BlockPool(runner.num_blocks, runner.block_size)
        self.queue = RequestQueue(QueueLimits(max_requests=1000, max_source_tokens=100_000))
        self.limits = AdmissionLimits(
            vocab_size=runner.vocab_size,
            max_source_len=runner.max_source_len,
            max_target_len=runner.max_target_len,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
        )
        self.stepper = Stepper(
            StepParts(
                runner=cast(Runner, self.recorder),
                queue=self.queue,
                pool=self.pool,
                limits=SchedulerLimits(max_num_seqs=runner.max_rows, max_num_batched_tokens=160),
                metrics=Metrics(CollectorRegistry()),
                live=self.live,
                clock=FakeClock(),
            )
        )

    def add(self, request: Request) -> None:
        sequence = admit(request, OutputStream(request.request_id, loop=self.loop), self.limits)
        self.queue.put(sequence, 0.0)
        self.live[request.request_id] = self.sequences[request.request_id] = sequence

    def step(self, *cancelled: str) -> None:
        self.stepper.step(cancelled)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks

    def finish(self) -> None:
        while self.stepper.has_work:
            self.step()
        assert self.pool.num_free == self.pool.num_blocks

    def outcome(self, name: str, eos_id: int) -> tuple[Choices, FinishReason]:
        """What was chosen for a request, which must be what it was sent, and how it ended."""
        choices = self.recorder.choices.get(name, [])
        event = self.loop.run_until_complete(self.sequences[name].stream.collect())
        assert event.finish_reason is not None
        assert list(event.token_ids) == [token_id for token_id, _ in choices if token_id != eos_id]
        return choices, event.finish_reason


def random_request(dice: random.Random, name: str, runner: NativeRunner) -> Request:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(4, runner.vocab_size) for _ in range(count))

    params = SamplingParams(
        max_new_tokens=dice.choice([1, 4, 12, None]),
        temperature=dice.choice([0.0, 0.0, 0.6, 1.0, 4.0]),
        top_k=dice.choice([0, 0, 1, 5, 50]),
        top_p=dice.choice([1.0, 1.0, 0.3, 0.95]),
        seed=dice.randint(0, MAX_SEED),
    )
    prefix = ids(dice.choice([0, 0, 1, 3, 8, runner.max_target_len - 1]))
    return request_of(name, ids(dice.randint(1, runner.max_source_len)), params=params, prefix=prefix)


def run_mix(runner: NativeRunner, dice: random.Random, loop: asyncio.AbstractEventLoop) -> Crowd:
    crowd = Crowd(runner, loop)
    pace = dice.choice([0.1, 0.4, 1.5])  # steps for each arrival: the crowd is dense or thin
    for index in range(NUM_REQUESTS):
        crowd.add(random_request(dice, str(index), runner))
        while dice.random() < pace / (1 + pace):
            crowd.step(*dice.sample(list(crowd.live), int(dice.random() < 0.05 * len(crowd.live))))
    crowd.finish()
    return crowd


def check_against_alone(crowd: Crowd, runner: NativeRunner) -> None:
    alone = Crowd(runner, crowd.loop)
    for name, sequence in crowd.sequences.items():
        together, reason = crowd.outcome(name, runner.eos_id)
        alone.add(sequence.request)
        alone.finish()
        expected, ended = alone.outcome(name, runner.eos_id)
        if reason is FinishReason.CANCELLED:
            expected = expected[: len(together)]
        else:
            assert reason is ended
        assert together == expected, f"{sequence.request} differs after {len(sequence.request.prefix_ids)} tokens"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_requests_of_a_random_mix_get_the_bits_they_get_alone(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision, threads: int
) -> None:
    crowded = NativeRunner(bundle, max_rows=MAX_ROWS, threads=threads, precision=precision)
    alone = NativeRunner(bundle, max_rows=1, threads=1, precision=precision)
    num_mixed_steps = 0
    for seed in range(ROUNDS):
        crowd = run_mix(crowded, random.Random(seed), loop)
        check_against_alone(crowd, alone)
        num_mixed_steps += crowd.recorder.num_mixed_steps
    assert num_mixed_steps > ROUNDS  # prefixes were fed beside other rows' tokens


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_requests_get_the_bits_they_get_alone_with_every_kind_of_positions(
    variant: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    crowded = NativeRunner(variant, max_rows=MAX_ROWS, threads=2, precision=precision)
    alone = NativeRunner(variant, max_rows=1, threads=1, precision=precision)
    for seed in range(-(-ROUNDS // 4)):
        check_against_alone(run_mix(crowded, random.Random(seed), loop), alone)


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_a_prefix_of_its_own_output_goes_on_with_the_same_bits(
    bundle: Bundle, loop: asyncio.AbstractEventLoop, precision: Precision
) -> None:
    runner = NativeRunner(bundle, max_rows=1, threads=1, precision=precision)
    crowd = Crowd(runner, loop)
    dice = random.Random(0)
    for index in range(4):
        request = dataclasses.replace(random_request(dice, f"whole {index}", runner), prefix_ids=())
        request = dataclasses.replace(request, params=dataclasses.replace(request.params, max_new_tokens=12))
        crowd.add(request)
        crowd.finish()
        whole, _ = crowd.outcome(request.request_id, runner.eos_id)
        for cut in range(1, len(whole)):
            prefix = tuple(token_id for token_id, _ in whole[:cut])
            params = dataclasses.replace(request.params, max_new_tokens=len(whole) - cut)
            name = f"cut {index} {cut}"
            crowd.add(dataclasses.replace(request, request_id=name, prefix_ids=prefix, params=params))
            crowd.finish()
            assert crowd.outcome(name, runner.eos_id)[0] == whole[cut:]
