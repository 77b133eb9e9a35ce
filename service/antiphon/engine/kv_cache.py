"""Cache blocks: their pool, the blocks of each request, and the block tables of the rows.

A block holds the keys and values of block_size tokens, or the state of constant size of one target. A request holds
the blocks of its source, which all its rows read, and blocks of each row's target. A row's tables name them in the
order of the tokens:

    source  5 tokens of 4 a block    cross table [7, 2]       read by every row of the request
    target  9 tokens of 4 a block    self table  [3, 11, 5]   written at position 9: block 5, offset 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.observability.engine_metrics import CacheUse
from antiphon.ops.cache_geometry import blocks_for
from antiphon.runtime.runner import Runner


class OutOfBlocks(Exception):
    """An allocation of more blocks than are free; no block was allocated."""


class BlockPool:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens; free + used is always the total. For one thread."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 0")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: a block just freed is used again while warm
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks allocated and not yet freed."""
        return self.num_blocks - len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        """Return whether num_blocks blocks are free now."""
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take num_blocks blocks out of the pool, all of them or none. Raises OutOfBlocks."""
        if not self.can_allocate(num_blocks):
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        for block in blocks:
            self._is_used[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks. Raises ValueError, and frees none, if one is not of this pool or is free already."""
        returned = tuple(blocks)
        if len(set(returned)) != len(returned):
            raise ValueError(f"blocks {returned} name a block twice")
        for block in returned:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not of this pool of {self.num_blocks}")
            if not self._is_used[block]:
                raise ValueError(f"block {block} is free already")
        for block in returned:
            self._is_used[block] = 0
        self._free.extend(reversed(returned))


class KVCache:
    """Blocks of the requests that all lanes have admitted.

    target_block_size: target tokens of a block. num_cross_blocks: blocks of sources in use.
    """

    def __init__(self, pool: BlockPool, target_block_size: int) -> None:
        self.pool = pool
        self.target_block_size = target_block_size
        self.num_cross_blocks = 0

    def use(self, bytes_per_token: int) -> CacheUse:
        """Return the present division of the pool."""
        return CacheUse(
            num_self=self.pool.num_used - self.num_cross_blocks,
            num_cross=self.num_cross_blocks,
            num_free=self.pool.num_free,
            block_bytes=self.pool.block_size * bytes_per_token,
        )

    def allocate(self, group: SequenceGroup) -> None:
        """Give a joining group the blocks of its source, and its starting sequences their first blocks."""
        group.cross_block_table = self.pool.allocate(group.num_cross_blocks)
        group.hold(group.cross_block_table)
        for sequence in group.starting:
            self.allocate_output(sequence)
        self.num_cross_blocks += group.num_cross_blocks

    def allocate_output(self, sequence: Sequence) -> None:
        """Give one output of a group its first blocks."""
        sequence.self_block_table = self.pool.allocate(sequence.group.num_first_blocks)
        sequence.group.hold(sequence.self_block_table)

    def append(self, sequence: Sequence) -> None:
        """Give an output one more block."""
        blocks = self.pool.allocate(1)
        sequence.self_block_table += blocks
        sequence.group.hold(blocks)

    def free(self, group: SequenceGroup) -> None:
        """Free all blocks of a group."""
        self.pool.free(group.blocks)
        group.blocks = set()
        self.num_cross_blocks -= group.num_cross_blocks

    def free_preempted(self, group: SequenceGroup) -> None:
        """Free all blocks of a preempted group; to continue, it needs blocks for all tokens it has produced."""
        self.free(group)
        if not group.grows:
            return
        num_produced = sum(len(sequence.produced) for sequence in group.sequences)
        num_fed = 1 + len(group.request.prefix_ids) + num_produced
        group.num_first_blocks = first_blocks(num_fed, group.num_self_blocks, self.target_block_size)

    def free_output(self, sequence: Sequence) -> None:
        """Free the blocks of one output of a group."""
        self.free_unread(sequence.group, set(sequence.self_block_table) & sequence.group.blocks)

    def free_unread(self, group: SequenceGroup, blocks: set[int]) -> None:
        """Free blocks of a group that none of its rows reads any more."""
        self.pool.free(blocks)
        group.blocks -= blocks


def may_run_short(runner: Runner, num_rows: int) -> bool:
    """Return whether num_rows rows could need more blocks than the pool has."""
    return runner.facts.num_blocks < num_rows * runner.facts.blocks_of_longest


def first_blocks(num_fed: int, num_self_blocks: int, block_size: int) -> int:
    """Return the number of blocks for num_fed target tokens and one more, at most that of the longest target."""
    return min(blocks_for(num_fed + 1, block_size), num_self_blocks)


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks of one running request.

    ticket: its place in the order of admission, from 1, which it keeps to its end.
    source_blocks: in the order of the source's tokens. blocks: all of them, without order.
    """

    ticket: int
    source_blocks: tuple[int, ...]
    blocks: frozenset[int]

    @property
    def target_blocks(self) -> tuple[int, ...]:
        """Blocks of its targets, ascending; its beams share some of them."""
        return tuple(sorted(self.blocks.difference(self.source_blocks)))


def holder_of(group: SequenceGroup) -> BlockHolder:
    """Copy the blocks of an admitted group. Hold the engine's lock meanwhile."""
    return BlockHolder(group.ticket, group.cross_block_table, frozenset(group.blocks))


class BlockTables:
    """Cache blocks that each row reads.

    self_width, cross_width: blocks of the longest target and of the longest source.
    own: [max_rows, self_width], blocks of the target. A row of a beam search may name blocks of other beams.
    num_own: [max_rows], blocks that the sequence of a row holds itself.
    cross: [max_rows, cross_width], blocks of the source.
    """

    def __init__(self, max_rows: int, *, self_width: int, cross_width: int) -> None:
        self.own: NDArray[np.int32] = np.zeros((max_rows, self_width), np.int32)
        self.num_own: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.cross: NDArray[np.int32] = np.zeros((max_rows, cross_width), np.int32)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Every array, with one entry for each row."""
        return self.own, self.num_own, self.cross

    def fill(self, row: int, sequence: Sequence) -> None:
        """Write the blocks of a sequence that starts in a row."""
        self.extend(row, sequence)
        cross_block_table = sequence.group.cross_block_table
        self.cross[row, : len(cross_block_table)] = cross_block_table

    def extend(self, row: int, sequence: Sequence) -> None:
        """Write the sequence's own blocks again after it received more."""
        num_blocks = len(sequence.self_block_table)
        self.num_own[row] = num_blocks
        self.own[row, :num_blocks] = sequence.self_block_table
