"""Pool of cache blocks: free and used block ids.

Owns counts and ids. Does not know the memory, the content and the users of a block.
"""

from __future__ import annotations

from collections.abc import Iterable


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
        taken = tuple(self._free.pop() for _ in range(num_blocks))
        for block in taken:
            self._is_used[block] = 1
        return taken

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
