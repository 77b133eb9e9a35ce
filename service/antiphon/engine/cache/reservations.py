"""Cache blocks of each request: taken at admission, extended while it grows, freed when it ends or is preempted.

If the pool could run short, a request of one row first takes the blocks of its source and of its first input, and one
more block whenever it is about to write beyond them. If no block is free at that time, one of the growing requests is
preempted: batch before interactive, the newest first. Every other row takes the blocks of its longest target when it
starts. If the pool is large enough for all rows, no row grows and no row is checked. Knows no events and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import Priority
from antiphon.engine.batch.rows import RunningRows
from antiphon.engine.cache.block_pool import BlockPool
from antiphon.engine.sequences.sequence import Sequence, SequenceGroup
from antiphon.observability.metrics.engine_metrics import CacheUse
from antiphon.ops.cache_geometry import blocks_for, blocks_of_longest
from antiphon.runtime.runner import Runner

# Blocks that rows will need within this number of steps are not given to new requests. A request that gets the last
# blocks would be preempted at once, and the work on its source would be lost. Simulated with blocks for 7 % and 15 % of
# 64 longest rows, tokens a second: 0 steps 5,215 and 7,462 (437 and 129 preemptions in 15 s), 4 steps 5,415 and 7,312
# (23 and 0), 8 steps 5,327 and 7,037; 4,809 and 6,319 if all blocks are reserved at once.
LOOKAHEAD_STEPS = 4


def may_run_short(runner: Runner, num_rows: int) -> bool:
    """Return whether num_rows rows could need more blocks than the pool has."""
    facts = runner.facts
    source_len = facts.max_source_len if facts.has_encoder else 0
    longest = blocks_of_longest(source_len, facts.max_target_len, facts.block_size)
    return facts.has_decoder and facts.num_blocks < num_rows * longest


def first_blocks(num_fed: int, num_self_blocks: int, block_size: int) -> int:
    """Return the number of blocks for num_fed target tokens and one more, at most that of the longest target."""
    return min(blocks_for(num_fed + 1, block_size), num_self_blocks)


def empty_rows(runner: Runner, num_rows: int) -> RunningRows:
    """Return num_rows empty rows. They keep their tokens if the runner can resume a preempted row."""
    return RunningRows(
        num_rows,
        self_width=blocks_for(runner.facts.max_target_len, runner.facts.block_size) if runner.facts.has_decoder else 1,
        cross_width=blocks_for(runner.facts.max_source_len, runner.facts.block_size) if runner.facts.has_encoder else 1,
        history_width=1 + runner.facts.max_target_len if runner.facts.has_decoder else 0,
    )


class Reservations:
    """The blocks of every admitted group, over the rows and the pool of an engine.

    can_grow: requests of one row receive further blocks when they need them.
    lanes: the reservations of all lanes over the same pool, in order; this one adds itself.
    """

    def __init__(
        self, rows: RunningRows, pool: BlockPool, *, can_grow: bool, lanes: list[Reservations] | None = None
    ) -> None:
        self._lanes = lanes if lanes is not None else []
        self._lanes.append(self)
        self._rows = rows
        self._pool = pool
        self._can_grow = can_grow
        self._num_quiet_steps = 0  # steps for which no row needs a block
        self.num_cross_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Total number of blocks."""
        return self._pool.num_blocks

    @property
    def num_admissible_blocks(self) -> int:
        """Free blocks that no running row of any lane will need soon."""
        if not self._can_grow:
            return self._pool.num_free
        return self._pool.num_free - sum(lane._num_needed_soon() for lane in self._lanes)

    @property
    def num_all_cross_blocks(self) -> int:
        """Blocks of sources, of all lanes."""
        return sum(lane.num_cross_blocks for lane in self._lanes)

    def use(self, bytes_per_token: int) -> CacheUse:
        """Return the present division of the pool among all lanes."""
        num_cross = self.num_all_cross_blocks
        return CacheUse(
            num_self=self._pool.num_used - num_cross,
            num_cross=num_cross,
            num_free=self._pool.num_free,
            block_bytes=self._pool.block_size * bytes_per_token,
        )

    def take(self, group: SequenceGroup) -> None:
        """Give a joining group the blocks of its source, and its starting sequences their first blocks."""
        group.cross_block_table = self._pool.allocate(group.num_cross_blocks)
        group.hold(group.cross_block_table)
        for sequence in group.starting:
            self.take_output(sequence)
        self.num_cross_blocks += group.num_cross_blocks
        self._num_quiet_steps = 0

    def take_output(self, sequence: Sequence) -> None:
        """Give one output of a group its first blocks."""
        sequence.self_block_table = self._pool.allocate(sequence.group.num_first_blocks)
        sequence.group.hold(sequence.self_block_table)

    def give_back(self, group: SequenceGroup) -> None:
        """Free all blocks of a group."""
        self._pool.free(group.blocks)
        group.blocks = set()
        self.num_cross_blocks -= group.num_cross_blocks

    def give_back_preempted(self, group: SequenceGroup) -> None:
        """Free all blocks of a preempted group; to continue, it needs blocks for all tokens it has produced."""
        self.give_back(group)
        if not group.grows:
            return
        num_fed = 1 + len(group.request.prefix_ids) + sum(len(one.produced) for one in group.sequences)
        group.num_first_blocks = first_blocks(num_fed, group.num_self_blocks, self._pool.block_size)

    def give_back_output(self, sequence: Sequence) -> None:
        """Free the blocks of one output of a group."""
        freed = set(sequence.self_block_table) & sequence.group.blocks
        self._pool.free(freed)
        sequence.group.blocks -= freed

    def grow(self, preempt: Callable[[SequenceGroup], None]) -> None:
        """Give every row the block that it is about to write to. Call it once a step, before any group joins.

        preempt: frees the row and the blocks of a group.
        """
        if not self._can_grow:
            return
        if self._num_quiet_steps > 0:
            self._num_quiet_steps -= 1
            return
        short = [self._rows.sequences[row] for row in np.flatnonzero(self._slack() <= 0).tolist()]
        for sequence in sorted(short, key=_preemption_key):
            while sequence.row is not None and not self._pool.num_free:
                preempt(max((one for one in self._rows.sequences if one.group.grows), key=_preemption_key).group)
            if sequence.row is not None:
                self._extend(sequence)
        self._num_quiet_steps = int(self._slack().min()) - 1 if self._rows else 0

    def _num_needed_soon(self) -> int:
        """Return the number of rows that will need a block within LOOKAHEAD_STEPS."""
        is_soon = (self._slack() <= LOOKAHEAD_STEPS) & (self._ends() < self._rows.end_positions[: len(self._rows)])
        return int(is_soon.sum())

    def _slack(self) -> NDArray[np.int32]:
        """Return the number of positions that each row can still write to."""
        num_rows = len(self._rows)
        slack: NDArray[np.int32] = self._ends() - self._rows.positions[:num_rows]
        return slack

    def _ends(self) -> NDArray[np.int32]:
        """Return the first position beyond the blocks of each row."""
        ends: NDArray[np.int32] = self._rows.tables.num_own[: len(self._rows)] * np.int32(self._pool.block_size)
        return ends

    def _extend(self, sequence: Sequence) -> None:
        blocks = self._pool.allocate(1)
        sequence.self_block_table += blocks
        sequence.group.hold(blocks)
        self._rows.extend(sequence)


def _preemption_key(sequence: Sequence) -> tuple[bool, int]:
    """Return the sort key of sequences that need a block: interactive before batch, then the oldest first."""
    group = sequence.group
    return group.request.priority is Priority.BATCH, group.ticket
