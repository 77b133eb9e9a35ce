"""Single steps of an engine over native graphs. No other test uses their pool at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle
from typing import cast

from prometheus_client import CollectorRegistry

from antiphon.domain.request import (
    CancelCause,
    Cancellations,
    Request,
    TokenEvent,
)
from antiphon.engine.admission import admit, limits_of
from antiphon.engine.kv_cache import BlockPool
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.step import EngineState, Stepper
from antiphon.engine.stream import OutputStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.runtime.native import NativeRunner
from antiphon.runtime.runner import DecodeBatch, Runner, Samples
from tests.fakes import FakeClock, limits_for, stream_of


class Watcher:
    """Runner that counts the steps in which some rows fed prefixes and others single tokens."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self.num_mixed_steps = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def decode(self, batch: DecodeBatch) -> Samples:
        self.num_mixed_steps += batch.num_tokens > batch.num_rows > 1
        return self._runner.decode(batch)


class Crowd:
    """Single steps of an engine over a runner. No other test uses the runner's pool at the same time.

    further: runners of further lanes over the same pool. The lanes step in turn.
    """

    def __init__(
        self, runner: NativeRunner, loop: asyncio.AbstractEventLoop, further: Sequence[NativeRunner] = ()
    ) -> None:
        self.loop = loop
        self.live: dict[str, SequenceGroup] = {}
        self.groups: dict[str, SequenceGroup] = {}
        self.cancellations = Cancellations()
        self.watcher = Watcher(runner)
        self.pool = BlockPool(runner.facts.num_blocks, runner.facts.block_size)
        limits = limits_for(runner, max_num_batched_tokens=160, max_queued_requests=1000, max_queued_tokens=100_000)
        self.queue = RequestQueue(limits)
        self.limits = limits_of(runner, limits)
        self.registry = CollectorRegistry()
        state = EngineState(
            runner,
            queue=self.queue,
            pool=self.pool,
            limits=limits,
            metrics=Metrics(MetricFamilies(self.registry), "fake"),
            live=self.live,
            clock=FakeClock(),
            cancellations=self.cancellations,
        )
        runners = (cast(Runner, self.watcher), *further)
        self._steppers = [Stepper(state, lane_runner) for lane_runner in runners]
        self._turns = cycle(self._steppers)

    def add(self, request: Request) -> None:
        group = admit(request, OutputStream(request.request_id, loop=self.loop), self.limits)
        self.queue.put(group, 0.0)
        self.live[request.request_id] = self.groups[request.request_id] = group

    def step(self, *cancelled: str) -> None:
        for request_id in cancelled:
            self.cancellations.put(request_id, CancelCause.CLIENT)
        next(self._turns).step()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks

    @property
    def num_preemptions(self) -> int:
        return int(self.registry.get_sample_value("antiphon_preemptions_total", {"model_name": "fake"}) or 0)

    def finish(self) -> None:
        while any(stepper.has_work for stepper in self._steppers):
            self.step()
        assert self.pool.num_free == self.pool.num_blocks

    def events(self, name: str) -> tuple[TokenEvent, ...]:
        """Return the terminal event of each output of a request."""
        return self.loop.run_until_complete(stream_of(self.groups[name]).collect())
