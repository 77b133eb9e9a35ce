"""A stepper over the fake model, one step at a time, with the checks that must hold after any step."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from antiphon.service.admission import AdmissionLimits, admit
from antiphon.service.kv_cache import BlockPool
from antiphon.service.metrics import Metrics
from antiphon.service.request import FinishReason, SamplingParams, TokenEvent
from antiphon.service.request_queue import QueueLimits, RequestQueue
from antiphon.service.scheduler import SchedulerLimits
from antiphon.service.sequence import Sequence, SequenceState
from antiphon.service.step import StepParts, Stepper
from antiphon.service.stream import OutputStream
from tests.fakes import FakeClock, FakeRunner, request_of

BLOCK_SIZE = 4


class Bench:
    """A stepper over the fake model, every sequence it was given, and the checks that must hold after any step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_rows: int = 4, num_blocks: int = 64) -> None:
        self.loop = loop
        self.runner = FakeRunner(max_rows=max_rows, block_size=BLOCK_SIZE, num_blocks=num_blocks)
        self.clock = FakeClock()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.queue = RequestQueue(QueueLimits(max_requests=100, max_source_tokens=10_000))
        self.live: dict[str, Sequence] = {}
        self.all: list[Sequence] = []
        self.registry = CollectorRegistry()
        self.stepper = Stepper(
            StepParts(
                runner=self.runner,
                queue=self.queue,
                pool=self.pool,
                limits=SchedulerLimits(max_num_seqs=max_rows, max_num_batched_tokens=16),
                metrics=Metrics(self.registry),
                live=self.live,
                clock=self.clock,
            )
        )

    def add(
        self,
        name: str,
        source: tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        within_s: float | None = None,
        prefix: tuple[int, ...] = (),
    ) -> Sequence:
        deadline_s = None if within_s is None else self.clock() + within_s
        request = request_of(name, source, params=params, arrival_s=self.clock(), deadline_s=deadline_s, prefix=prefix)
        limits = AdmissionLimits(
            vocab_size=self.runner.vocab_size,
            max_source_len=self.runner.max_source_len,
            max_target_len=self.runner.max_target_len,
            num_blocks=self.pool.num_blocks,
            block_size=BLOCK_SIZE,
        )
        sequence = admit(request, OutputStream(name, loop=self.loop), limits)
        self.queue.put(sequence, self.clock())
        self.live[name] = sequence
        self.all.append(sequence)
        return sequence

    def step(self, *cancelled: str) -> None:
        self.stepper.step(cancelled)
        self.check()

    def finish(self) -> None:
        while self.stepper.has_work:
            self.step()

    def check(self) -> None:
        running = [sequence for sequence in self.all if sequence.state is SequenceState.RUNNING]
        tables = [block for s in running for block in s.self_block_table + s.cross_block_table]
        assert len(set(tables)) == len(tables) == self.pool.num_used
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert sorted(s.row for s in running if s.row is not None) == list(range(len(running)))
        assert self.stepper.num_running == len(running)
        assert set(self.live) == {s.request_id for s in self.all if s.state is not SequenceState.FINISHED}

    def output(self, sequence: Sequence) -> TokenEvent:
        """Everything a finished sequence sent, as one event."""
        return self.loop.run_until_complete(asyncio.wait_for(sequence.stream.collect(), 30))

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"antiphon_{name}", labels)


def expected(bench: Bench, sequence: Sequence) -> tuple[tuple[int, ...], FinishReason]:
    request = sequence.request
    token_ids, reason = bench.runner.answer(
        request.source_ids, request.params.max_new_tokens, prefix_len=len(request.prefix_ids)
    )
    return tuple(token_ids), reason
