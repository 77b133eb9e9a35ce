"""Objects that the parts of a step share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.service.domain.cancellation import Cancellations
from antiphon.service.domain.limits import EngineLimits
from antiphon.service.engine.batch.rows import RunningRows
from antiphon.service.engine.beams.beam_rows import BeamRows
from antiphon.service.engine.cache.block_pool import BlockPool
from antiphon.service.engine.cache.reservations import Reservations, empty_rows, may_run_short
from antiphon.service.engine.queue.request_queue import RequestQueue
from antiphon.service.engine.scheduling.row_turns import RowTurns
from antiphon.service.engine.sequences.sequence import SequenceGroup
from antiphon.service.observability.metrics.engine_metrics import Metrics
from antiphon.service.runtime.runner import Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Objects that the parts of a stepper share.

    live: every group that has not received its last event, by request id.
    cancellations: requests that the next step ends first.
    """

    runner: Runner
    queue: RequestQueue
    pool: BlockPool
    limits: EngineLimits
    metrics: Metrics
    live: dict[str, SequenceGroup]
    clock: Callable[[], float]
    cancellations: Cancellations = field(default_factory=Cancellations)


@dataclass(kw_only=True, slots=True)
class RunningState:
    """Rows, blocks, turns and beam searches of the groups that were admitted.

    num_groups: groups that hold rows or blocks.
    """

    rows: RunningRows
    reservations: Reservations
    turns: RowTurns
    beams: BeamRows
    num_groups: int = 0

    @classmethod
    def of(cls, parts: StepParts) -> RunningState:
        """Build the state of an engine that runs nothing."""
        rows = empty_rows(parts.runner, parts.limits.max_num_seqs)
        can_grow = may_run_short(parts.runner, parts.limits.max_num_seqs)
        reservations = Reservations(rows, parts.pool, can_grow=can_grow)
        return cls(
            rows=rows,
            reservations=reservations,
            turns=RowTurns(rows, reservations, parts.queue, parts.limits),
            beams=BeamRows(rows, parts.pool, parts.runner),
        )
