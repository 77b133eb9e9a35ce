"""Stepper over the fake model, run step by step, with the invariants that must hold after every step."""

import asyncio
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from antiphon.architecture.heads import HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.domain.request import CancelCause, Cancellations, FinishReason, Request, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.admission import admit, limits_of
from antiphon.engine.kv_cache import BlockPool
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.sequence import SequenceGroup, SequenceState
from antiphon.engine.step import EngineState, Stepper
from antiphon.engine.stream import OutputStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from tests.fakes import FakeClock, FakeRunner, changed, limits_for, request_of, stream_of

BLOCK_SIZE = 4


class Bench:
    """Stepper over the fake model, all its requests, and the invariants that must hold after every step."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        max_rows: int = 4,
        num_blocks: int = 64,
        reads_history: bool = False,
        is_recurrent: bool = False,
        has_encoder: bool = True,
        max_target_len: int = 32,
        heads: Mapping[HeadTask, HeadConfig] | None = None,
    ) -> None:
        """heads: of an encoder-only model."""
        self.loop = loop
        self.runner = FakeRunner(
            max_rows=max_rows,
            max_target_len=max_target_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            reads_history=reads_history,
            is_recurrent=is_recurrent,
            has_encoder=has_encoder,
            has_decoder=heads is None,
            heads=heads,
        )
        self.clock = FakeClock()
        self.cancellations = Cancellations()
        self.pool = BlockPool(self.runner.facts.num_blocks, BLOCK_SIZE)
        self.limits = limits_for(
            self.runner, max_num_batched_tokens=16, max_queued_requests=100, max_queued_tokens=10_000
        )
        self.queue = RequestQueue(self.limits)
        self.live: dict[str, SequenceGroup] = {}
        self.all: list[SequenceGroup] = []
        self.registry = CollectorRegistry()
        state = EngineState(
            self.runner,
            queue=self.queue,
            pool=self.pool,
            limits=self.limits,
            metrics=Metrics(MetricFamilies(self.registry), "fake"),
            live=self.live,
            clock=self.clock,
            cancellations=self.cancellations,
        )
        self.stepper = Stepper(state, self.runner)

    def add(
        self,
        name: str,
        source: tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        within_s: float | None = None,
        prefix: tuple[int, ...] = (),
        is_streamed: bool = True,
    ) -> SequenceGroup:
        deadline_s = None if within_s is None else self.clock() + within_s
        request = request_of(name, source, params=params, arrival_s=self.clock(), deadline_s=deadline_s, prefix=prefix)
        return self.ask(changed(request, is_streamed=is_streamed))

    def ask(self, request: Request) -> SequenceGroup:
        group = admit(request, OutputStream(request.request_id, loop=self.loop), limits_of(self.runner, self.limits))
        self.queue.put(group, self.clock())
        self.live[request.request_id] = group
        self.all.append(group)
        return group

    def step(self, *cancelled: str) -> None:
        for request_id in cancelled:
            self.cancellations.put(request_id, CancelCause.CLIENT)
        self.stepper.step()
        self.check()

    def finish(self) -> None:
        while self.stepper.has_work:
            self.step()

    def check(self) -> None:
        running = [group for group in self.all if group.state is SequenceState.RUNNING]
        blocks = [block for group in running for block in group.blocks]
        assert len(set(blocks)) == len(blocks) == self.pool.num_used
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        rows = [one.row for group in self.all for one in group.sequences if one.row is not None]
        assert sorted(rows) == list(range(len(rows)))
        assert self.stepper.num_running == len(running)
        assert set(self.live) == {group.request_id for group in self.all if group.state is not SequenceState.FINISHED}

    def outputs(self, group: SequenceGroup) -> tuple[TokenEvent, ...]:
        """Return the events of a finished request, one for each output."""
        return self.loop.run_until_complete(asyncio.wait_for(stream_of(group).collect(), 30))

    def output(self, group: SequenceGroup) -> TokenEvent:
        """Return the event of a finished request with one output."""
        (event,) = self.outputs(group)
        return event

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"antiphon_{name}", {"model_name": "fake", **labels})


def expected(bench: Bench, group: SequenceGroup) -> tuple[tuple[int, ...], FinishReason]:
    request = group.request
    token_ids, reason = bench.runner.answer(
        request.source_ids, request.params.max_new_tokens, prefix_len=len(request.prefix_ids)
    )
    return tuple(token_ids), reason
