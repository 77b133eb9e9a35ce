"""Rows and blocks that each caller holds, and its share of both while other callers want them too.

The share is an equal part of all rows, and of all blocks, for each caller that holds or wants any. Arithmetic only;
knows no step, no queue and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from antiphon.domain.request import Task
from antiphon.engine.sequences.sequence import SequenceGroup

# Rows that are kept until their outputs end could prevent all others from starting. 1 / FIXED_RESERVE of all rows is
# therefore closed to such rows of one caller.
FIXED_RESERVE = 8


class Shares:
    """Rows and blocks that the callers of admitted groups hold.

    num_rows, num_blocks: totals of the engine. callers: names of those that hold or want rows.
    """

    def __init__(
        self, groups: Iterable[SequenceGroup], callers: Iterable[str], *, num_rows: int, num_blocks: int
    ) -> None:
        self.rows: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self._fixed_rows: Counter[str] = Counter()
        for group in groups:
            self.note(group, group.num_held_rows, len(group.blocks))
        self._callers = {*callers, *self.rows, *self.blocks}
        self._totals = num_rows, num_blocks
        self._num_rows = max(1, num_rows // max(1, len(self._callers)))
        self._num_blocks = num_blocks // max(1, len(self._callers))
        self._max_fixed_rows = num_rows - num_rows // FIXED_RESERVE

    @property
    def is_contended(self) -> bool:
        """Return whether more than one caller holds or wants rows."""
        return len(self._callers) > 1

    @property
    def is_uneven(self) -> bool:
        """Return whether some caller holds more than its share while others hold or want rows."""
        return any(map(self.exceeds_rows, self.rows)) or any(map(self.exceeds_blocks, self.blocks))

    def note(self, group: SequenceGroup, num_rows: int, num_blocks: int) -> None:
        """Count rows and blocks that a group takes; negative numbers count those that it gives back."""
        self.rows[group.request.client] += num_rows
        self.blocks[group.request.client] += num_blocks
        if is_fixed(group):
            self._fixed_rows[group.request.client] += num_rows

    def has_room(self, group: SequenceGroup, num_rows: int, num_blocks: int) -> bool:
        """Return whether a group's caller holds nothing, or stays within its share with these rows and blocks."""
        client = group.request.client
        is_within = self.rows[client] + num_rows <= self._num_rows
        return (is_within and self.blocks[client] + num_blocks <= self._num_blocks) or not self.rows[client]

    def turn(self, *, is_within: bool) -> Callable[[SequenceGroup], bool]:
        """Return a test of whether a waiting group may join; each group that passes counts in later tests.

        is_within: groups pass only where their caller stays within its share.
        """
        then = self._copy()

        def may_join(group: SequenceGroup) -> bool:
            has_room = not is_within or then.has_room(group, group.num_first_rows, group.num_blocks)
            if not has_room or not then.may_start(group):
                return False
            room = then.row_room(group.request.client)
            then.note(group, max(group.num_first_rows, min(group.num_rows, room)), group.num_blocks)
            return True

        return may_join

    def _copy(self) -> Shares:
        num_rows, num_blocks = self._totals
        then = Shares((), self._callers, num_rows=num_rows, num_blocks=num_blocks)
        then.rows, then.blocks, then._fixed_rows = self.rows.copy(), self.blocks.copy(), self._fixed_rows.copy()
        return then

    def row_room(self, client: str) -> int:
        """Return the number of rows that a caller may still take within its share."""
        return max(0, self._num_rows - self.rows[client])

    def may_start(self, group: SequenceGroup) -> bool:
        """Return whether a group that keeps its rows leaves the reserve free, or is its caller's first such group."""
        if not is_fixed(group):
            return True
        num_fixed = self._fixed_rows[group.request.client]
        return not num_fixed or num_fixed + group.num_rows <= self._max_fixed_rows

    def exceeds_rows(self, client: str) -> bool:
        """Return whether a caller holds more than its share of the rows."""
        return self.rows[client] > self._num_rows

    def exceeds_blocks(self, client: str) -> bool:
        """Return whether a caller holds more than its share of the blocks."""
        return self.blocks[client] > self._num_blocks


def is_fixed(group: SequenceGroup) -> bool:
    """Return whether a group keeps its rows until its outputs end, as a beam search does."""
    return group.request.task is Task.GENERATE and not group.can_pause
