"""Cache blocks by the running request that holds them: a copy that later steps do not change."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.engine.sequences.sequence import SequenceGroup


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
