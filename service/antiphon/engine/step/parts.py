"""Objects that the parts of a step share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Cancellations
from antiphon.engine.batch.rows import RunningRows
from antiphon.engine.beams.beam_rows import BeamRows
from antiphon.engine.cache.block_pool import BlockPool
from antiphon.engine.cache.reservations import Reservations, empty_rows, may_run_short
from antiphon.engine.queue.request_queue import RequestQueue
from antiphon.engine.scheduling.row_turns import RowTurns
from antiphon.engine.sequences.sequence import SequenceGroup
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.runtime.runner import Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Objects that the parts of a stepper share, and that the steppers of all lanes share except for the runner.

    live: every group that has not received its last event, by request id.
    cancellations: requests that the next step of any lane ends first.
    lock: held during a step, except while the runner computes. It protects the state of all lanes.
    tickets: numbers of admitted groups, rising.
    """

    runner: Runner
    queue: RequestQueue
    pool: BlockPool
    limits: EngineLimits
    metrics: Metrics
    live: dict[str, SequenceGroup]
    clock: Callable[[], float]
    cancellations: Cancellations = field(default_factory=Cancellations)
    lock: threading.Lock = field(default_factory=threading.Lock)
    lanes: Lanes = field(default_factory=lambda: Lanes())
    tickets: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let other lanes step while this lane's runner computes."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


@dataclass(kw_only=True, slots=True)
class RunningState:
    """Rows, blocks, turns and beam searches of the groups that one lane has admitted.

    index: index of the lane.
    cancellations: requests of this lane that its next step ends first.
    """

    index: int
    rows: RunningRows
    reservations: Reservations
    turns: RowTurns
    beams: BeamRows
    cancellations: Cancellations = field(default_factory=Cancellations)

    @classmethod
    def of(cls, parts: StepParts) -> RunningState:
        """Build the state of one more lane, which runs nothing, and add it to the lanes."""
        rows = empty_rows(parts.runner, parts.limits.max_num_seqs)
        can_grow = may_run_short(parts.runner, parts.limits.max_num_seqs)
        lanes = parts.lanes
        reservations = Reservations(rows, parts.pool, can_grow=can_grow, lanes=lanes.reservations)
        state = cls(
            index=len(lanes.states),
            rows=rows,
            reservations=reservations,
            turns=RowTurns(rows, reservations, parts.queue, parts.limits, lanes.turns),
            beams=BeamRows(rows, parts.pool, parts.runner),
        )
        lanes.states.append(state)
        return state

    @property
    def num_groups(self) -> int:
        """Groups that hold rows or blocks."""
        return self.turns.num_groups

    @property
    def has_work(self) -> bool:
        """Return whether this lane runs something, or has to end something."""
        return bool(self.rows) or bool(self.turns) or bool(self.cancellations)


@dataclass(kw_only=True, slots=True)
class Lanes:
    """State of all lanes of an engine, in order; each lane adds its own parts."""

    states: list[RunningState] = field(default_factory=list)
    turns: list[RowTurns] = field(default_factory=list)
    reservations: list[Reservations] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """Groups that hold rows or blocks."""
        return sum(state.num_groups for state in self.states)

    def is_other_running(self, index: int) -> bool:
        """Return whether a lane other than this one has work of its own."""
        return any(state.has_work or state.num_groups for state in self.states if state.index != index)
