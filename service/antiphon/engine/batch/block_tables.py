"""Block tables of the rows, as arrays that the runner reads. Allocates and frees nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.engine.sequences.sequence import Sequence


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
