"""Division of rows and blocks among callers: free rows go to outputs, and are taken from callers above their share.

The share is an equal part of all rows, and of all blocks, for each caller that holds or wants any. A caller may hold
more than its share only while no caller within its share wants rows. Free rows go first to callers within their shares.
If such callers receive no row for PATIENCE_STEPS, rows are taken from the caller that holds the most: batch before
interactive, the newest request first. A preempted output continues later with the same tokens. Each taken row therefore
costs the tokens that it must feed again, and sometimes the encoding of its source. To bound this cost, rows beyond a
share are given again only when none has been taken for CALM_STEPS.

A request of several samples runs with the rows that are free; its other outputs wait here. A beam search keeps all its
rows until its end, as does every request on graphs that cannot resume from a cache. One caller receives at most seven
in eight of all rows in this way, except for its first request, unless no other one has held or wanted rows for
LONE_STEPS.

If the pool could run short, a request of one row first takes the blocks of its source and of its first input, and one
more block whenever it is about to write beyond them. If no block is free at that time, one of the growing requests is
preempted: batch before interactive, the newest first. Every other row takes the blocks of its longest target when it
starts. If the pool is large enough for all rows, no row grows and no row is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Cancellations, Task
from antiphon.engine.batch import RunningRows
from antiphon.engine.kv_cache import KVCache
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.scheduler import MAX_DEFERRED_STEPS
from antiphon.engine.sequence import Sequence, SequenceGroup

# Rows that are kept until their outputs end could prevent all others from starting. 1 / FIXED_RESERVE of all rows is
# therefore closed to such rows of one caller.
FIXED_RESERVE = 8
# Steps without another caller after which one may keep all rows. The next caller then waits until an output ends.
LONE_STEPS = 1000
# A row that becomes free without preemption costs nothing. The scheduler waits up to MAX_DEFERRED_STEPS for several of
# them, so no row is taken before that.
PATIENCE_STEPS = MAX_DEFERRED_STEPS + 1
# If a caller asks for one short answer after another, a row that was taken for it stays free for its next request.
CALM_STEPS = 32
# Blocks that rows will need within this number of steps are not given to new requests. A request that gets the last
# blocks would be preempted at once, and the work on its source would be lost. Simulated with blocks for 7 % and 15 % of
# 64 longest rows, tokens a second: 0 steps 5,215 and 7,462 (437 and 129 preemptions in 15 s), 4 steps 5,415 and 7,312
# (23 and 0), 8 steps 5,327 and 7,037; 4,809 and 6,319 if all blocks are reserved at once.
LOOKAHEAD_STEPS = 4


class Shares:
    """Rows and blocks that the callers of admitted groups hold.

    num_rows, num_blocks: totals of the engine. callers: names of those that hold or want rows.
    num_fixed_rows: rows that one caller may keep until its outputs end.
    """

    def __init__(
        self,
        groups: Iterable[SequenceGroup],
        callers: Iterable[str],
        *,
        num_rows: int,
        num_blocks: int,
        num_fixed_rows: int,
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
        self._max_fixed_rows = num_fixed_rows

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

    def fits(self, group: SequenceGroup, *, is_within: bool) -> bool:
        """Return whether a waiting group may join. is_within: only if its caller stays within its share."""
        has_room = not is_within or self.has_room(group, group.num_first_rows, group.num_blocks)
        return has_room and self.may_start(group)

    def take(self, group: SequenceGroup) -> None:
        """Count a waiting group as if it joined with as many rows as its caller's share has left."""
        room = self.row_room(group.request.client)
        self.note(group, max(group.num_first_rows, min(group.num_rows, room)), group.num_blocks)

    def copy(self) -> Shares:
        """Return an independent copy."""
        num_rows, num_blocks = self._totals
        copy = Shares((), self._callers, num_rows=num_rows, num_blocks=num_blocks, num_fixed_rows=self._max_fixed_rows)
        copy.rows, copy.blocks, copy._fixed_rows = self.rows.copy(), self.blocks.copy(), self._fixed_rows.copy()
        return copy

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


@dataclass(kw_only=True, slots=True, eq=False)
class Lane:
    """Rows of one lane and the groups that it has admitted."""

    index: int
    rows: RunningRows
    cancellations: Cancellations = field(default_factory=Cancellations)
    """Requests of this lane that its next step ends first."""
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    """Groups that hold rows or blocks, in the order in which they joined."""
    pending: dict[str, SequenceGroup] = field(default_factory=dict)
    """Running groups with outputs that wait for rows."""
    encoding: dict[str, SequenceGroup] = field(default_factory=dict)
    """Admitted groups whose rows have not started."""
    has_taken: bool = False
    """Rows were taken at this step, so groups that want them should join at once."""
    is_blocked: bool = False
    """An output of a running group found a free row, but too few blocks or tokens left in this step; or a search found
    fewer free rows than it has beams."""
    num_steps: int = 0
    num_unserved_steps: int = 0
    """Steps in a row in which callers within their shares wanted rows and received none."""
    favoured: dict[str, int] = field(default_factory=dict)
    """Callers for whom rows were taken, and the step until which this counts."""
    num_lone_steps: int = LONE_STEPS
    """Steps since more than one caller held or wanted rows."""
    num_quiet_steps: int = 0
    """Steps for which no row needs another block."""
    budget_tokens: int = 0
    """Tokens left for outputs that start at this step."""
    shares: Shares | None = None
    """Shares at this step, computed when first needed."""

    @property
    def num_held(self) -> int:
        """Rows in use, or reserved for groups whose sources are being encoded."""
        return len(self.rows) + sum(len(group.starting) for group in self.encoding.values())

    @property
    def has_work(self) -> bool:
        """Return whether this lane runs something, or has to end something."""
        return bool(self.rows) or bool(self.pending) or bool(self.cancellations)


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Rows that a group wants within its caller's share, and blocks that it needs to receive any of them."""

    group: SequenceGroup
    num_rows: int
    num_blocks: int


class RowBudget:
    """Division of the rows and blocks of all lanes of an engine among callers.

    can_grow: requests of one row receive further blocks when they need them.
    """

    def __init__(self, queue: RequestQueue, cache: KVCache, limits: EngineLimits, *, can_grow: bool) -> None:
        self.lanes: list[Lane] = []
        self._queue = queue
        self._cache = cache
        self._limits = limits
        self._can_grow = can_grow
        self._callers: Counter[str] = Counter()  # number of admitted groups, by caller

    def add_lane(self, rows: RunningRows) -> Lane:
        """Add a lane, which runs nothing yet, and return it."""
        lane = Lane(index=len(self.lanes), rows=rows)
        self.lanes.append(lane)
        return lane

    @property
    def num_groups(self) -> int:
        """Groups of all lanes that hold rows or blocks."""
        return sum(len(lane.groups) for lane in self.lanes)

    @property
    def num_admissible_blocks(self) -> int:
        """Free blocks that no running row of any lane will need soon."""
        num_free = self._cache.pool.num_free
        if not self._can_grow:
            return num_free
        block_size = self._cache.target_block_size
        return num_free - sum(lane.rows.num_short_within(LOOKAHEAD_STEPS, block_size) for lane in self.lanes)

    def is_contended(self, lane: Lane) -> bool:
        """Return whether more than one caller holds or wants rows: the answer of the shares, which cost more."""
        return len(self._queue.clients.union(self._callers, lane.favoured)) > 1

    def is_other_running(self, lane: Lane) -> bool:
        """Return whether a lane other than this one has work of its own."""
        return any(other.has_work or other.groups for other in self.lanes if other is not lane)

    def num_free(self, lane: Lane) -> int:
        """Return the free rows that a lane may take now: its part of the work, so that lanes have equally many rows."""
        num_held = [other.num_held for other in self.lanes]
        num_free = self._limits.max_num_seqs - sum(num_held)
        if len(num_held) == 1 or not self._queue:
            return num_free
        num_wanted = min(self._limits.max_num_seqs, sum(num_held) + len(self._queue))
        num_own = -(-num_wanted // len(num_held)) - lane.num_held
        if lane.num_held == min(num_held):  # a group of several rows may start in the lane with the fewest
            next_groups = (*self._queue.peek(1), *lane.pending.values())
            num_own = max(num_own, max((group.num_first_rows for group in next_groups), default=0))
        return min(num_free, max(0, num_own))

    def admit(self, lane: Lane, group: SequenceGroup) -> None:
        """Count a group that received its first blocks. Its rows start once its source is encoded."""
        lane.encoding[group.request_id] = lane.groups[group.request_id] = group
        lane.num_quiet_steps = 0
        self._callers[group.request.client] += 1
        self._note(lane, group, len(group.starting), len(group.blocks))

    def begin(self, lane: Lane, group: SequenceGroup) -> None:
        """Record that the rows of an admitted group have started; its pending outputs wait for rows."""
        lane.encoding.pop(group.request_id, None)
        lane.shares = None  # other lanes may have changed what they hold while the source was encoded
        self.wait(lane, group)

    def wait(self, lane: Lane, group: SequenceGroup) -> None:
        """Add a running group whose pending outputs wait for rows."""
        if group.pending:
            lane.pending[group.request_id] = group

    def release(self, lane: Lane, group: SequenceGroup) -> None:
        """Forget a group that has ended or waits in the queue again; nothing if this lane did not admit it."""
        lane.encoding.pop(group.request_id, None)
        lane.pending.pop(group.request_id, None)
        if lane.groups.pop(group.request_id, None) is None:
            return
        client = group.request.client
        self._callers[client] -= 1
        if not self._callers[client]:
            del self._callers[client]

    def grow(self, lane: Lane, preempt: Callable[[SequenceGroup], None]) -> None:
        """Give every row the block that it is about to write to. Call it once a step, before any group joins.

        preempt: frees the row and the blocks of a group.
        """
        if not self._can_grow:
            return
        if lane.num_quiet_steps > 0:
            lane.num_quiet_steps -= 1
            return
        rows, pool = lane.rows, self._cache.pool
        short = [rows.sequences[row] for row in np.flatnonzero(rows.slack(self._cache.target_block_size) <= 0).tolist()]
        for sequence in sorted(short, key=_age):
            while sequence.row is not None and not pool.num_free:
                preempt(max((other for other in rows.sequences if other.group.grows), key=_age).group)
            if sequence.row is not None:
                self._cache.append(sequence)
                rows.extend(sequence)
        lane.num_quiet_steps = int(rows.slack(self._cache.target_block_size).min()) - 1 if rows else 0

    def make_room(self, lane: Lane, pause: Callable[[Sequence], None]) -> None:
        """Take rows from callers above their share if others have waited for rows long enough.

        Call it once a step, before any group joins. pause: preempts one output and frees its row and blocks.
        """
        lane.num_steps += 1
        is_contended = len(self._callers) > 1 or (bool(self._queue) and self.is_contended(lane))
        lane.num_lone_steps = 0 if is_contended else lane.num_lone_steps + 1
        lane.shares, lane.budget_tokens = None, self._limits.max_num_batched_tokens
        lane.has_taken = False
        lane.favoured = {caller: until for caller, until in lane.favoured.items() if until > lane.num_steps}
        if not self._queue and not lane.pending:
            lane.num_unserved_steps = 0
            return
        wants = self._wants(lane) if self.is_contended(lane) and self._shares(lane).is_uneven else []
        if not wants or not self._is_short(lane, wants):
            lane.num_unserved_steps = 0
            return
        lane.num_unserved_steps += 1
        if lane.num_unserved_steps > PATIENCE_STEPS:
            self._take(lane, wants, pause)

    def candidates(self, lane: Lane) -> list[SequenceGroup]:
        """Return the groups that may join now: those within their callers' shares, then others if rows are left."""
        count = 1 + self.num_free(lane)
        if not self._shares(lane).is_contended:
            return self._next_groups(lane, count, is_within=False)
        first = self._next_groups(lane, count, is_within=True)
        if len(first) == count or lane.favoured:  # rows beyond a share are not given after some were taken
            return first
        more = [group for group in self._next_groups(lane, count, is_within=False) if group not in first]
        return [*first, *more][:count]

    def start_pending(self, lane: Lane, bos_id: int) -> list[SequenceGroup]:
        """Give free rows to outputs of running groups, the oldest first, within this step's budget of tokens.

        Returns the beam searches that started: their beams start together. Where a caller's group may not start, its
        younger ones of the same kind do not overtake it.
        """
        lane.is_blocked = False
        if not lane.pending:  # as in most steps
            return []
        searches: list[SequenceGroup] = []
        refused: set[tuple[str, bool]] = set()  # caller, and whether its groups can pause
        for group in sorted(lane.pending.values(), key=lambda group: group.age):
            kind = (group.request.client, group.can_pause)
            while group.pending and kind not in refused and self.num_free(lane):
                if not self._may_start(lane, group):
                    refused.add(kind)
                    break
                lane.is_blocked = not self._can_start(lane, group)
                if lane.is_blocked:
                    return searches
                self._start_first(lane, group, bos_id)
                if group.is_beam_search:
                    searches.append(group)
            if not group.pending:
                del lane.pending[group.request_id]
        return searches

    def _start_first(self, lane: Lane, group: SequenceGroup, bos_id: int) -> None:
        """Give a row to the first pending output of a group, or rows to all beams of a search."""
        starting, group.pending = group.pending[: group.num_first_rows], group.pending[group.num_first_rows :]
        for sequence in starting:
            self._cache.allocate_output(sequence)
        lane.rows.append(starting, bos_id)
        lane.num_quiet_steps = 0
        self._note(lane, group, len(starting), len(starting) * group.num_first_blocks)

    def _can_start(self, lane: Lane, group: SequenceGroup) -> bool:
        """Return whether a group's next rows can start: rows and blocks are free, and the step's budget is enough.

        Takes the fed tokens from the budget. The first output may take more than the whole budget.
        """
        num_rows, sequence = group.num_first_rows, group.pending[0]
        num_blocks = num_rows * group.num_first_blocks
        if num_rows > self.num_free(lane) or num_blocks > self.num_admissible_blocks:
            return False
        num_fed = num_rows + len(group.request.prefix_ids) + len(sequence.produced)  # one beam feeds the prefix
        is_first = lane.budget_tokens == self._limits.max_num_batched_tokens
        if num_fed > lane.budget_tokens and not is_first:
            return False
        lane.budget_tokens -= num_fed
        return True

    def _may_start(self, lane: Lane, group: SequenceGroup) -> bool:
        """Return whether a group's next rows may start: its caller stays within its share, or no other wants rows."""
        shares, num_rows = self._shares(lane), group.num_first_rows
        if not shares.may_start(group):
            return False
        if not shares.is_contended or shares.has_room(group, num_rows, num_rows * group.num_first_blocks):
            return True
        return not lane.favoured and not self._next_groups(lane, 1, is_within=True)

    def _next_groups(self, lane: Lane, max_groups: int, *, is_within: bool) -> list[SequenceGroup]:
        """Return the waiting groups that may join, in order of service, as far as the shares allow them together.

        is_within: only groups whose callers stay within their shares. Where a group may not join, the later ones of its
            caller do not overtake it.
        """
        shares, groups = self._shares(lane).copy(), list[SequenceGroup]()
        with self._queue.in_order() as order:
            for group in order:
                if not shares.fits(group, is_within=is_within):
                    order.skip_client()
                    continue
                shares.take(group)
                groups.append(group)
                if len(groups) == max_groups:
                    break
        return groups

    def _note(self, lane: Lane, group: SequenceGroup, num_rows: int, num_blocks: int) -> None:
        lane.num_unserved_steps = 0
        self._shares(lane).note(group, num_rows, num_blocks)

    def _shares(self, lane: Lane) -> Shares:
        """Return the rows and blocks that callers hold at this step of a lane, in all lanes."""
        if lane.shares is None:
            num_rows = self._limits.max_num_seqs
            reserve = 0 if lane.num_lone_steps >= LONE_STEPS else num_rows // FIXED_RESERVE
            lane.shares = Shares(
                (group for other in self.lanes for group in other.groups.values()),
                self._queue.clients | lane.favoured.keys(),
                num_rows=num_rows,
                num_blocks=self._cache.pool.num_blocks,
                num_fixed_rows=num_rows - reserve,
            )
        return lane.shares

    def _wants(self, lane: Lane) -> list[_WantedRows]:
        """Return the rows wanted by callers within their shares, in the order in which they are served."""
        wants, counts, shares = [], Counter[str](), self._shares(lane)
        for group, num_rows, num_blocks in (*self._pending_rows(lane), *self._waiting_rows(lane)):
            client = group.request.client
            room = max(shares.row_room(client), 0 if counts[client] else group.num_first_rows) - counts[client]
            if room > 0:
                wants.append(_WantedRows(group, min(num_rows, room), num_blocks))
                counts[client] += min(num_rows, room)
        return wants

    def _pending_rows(self, lane: Lane) -> Iterator[tuple[SequenceGroup, int, int]]:
        """Return pending rows within callers' shares: running group, pending outputs, and blocks of one output."""
        for group in sorted(lane.pending.values(), key=lambda group: group.age):
            if self._shares(lane).has_room(group, 1, group.num_first_blocks):
                yield group, len(group.pending), group.num_first_blocks

    def _waiting_rows(self, lane: Lane) -> Iterator[tuple[SequenceGroup, int, int]]:
        """Return rows that waiting groups want within callers' shares: group, rows, and blocks that it needs to start.

        A request that is only encoded needs a free row too.
        """
        for group in self._next_groups(lane, self._limits.max_num_seqs, is_within=True):
            yield group, max(1, group.num_rows), group.num_blocks

    def _is_short(self, lane: Lane, wants: list[_WantedRows]) -> bool:
        return self._lacks_rows(lane, wants) or wants[0].num_blocks > self.num_admissible_blocks

    def _lacks_rows(self, lane: Lane, wants: list[_WantedRows]) -> bool:
        return sum(want.num_rows for want in wants) > self.num_free(lane)

    def _take(self, lane: Lane, wants: list[_WantedRows], pause: Callable[[Sequence], None]) -> None:
        while self._is_short(lane, wants):
            sequence = self._next_to_preempt(lane, wants)
            if sequence is None:
                return
            group = sequence.group
            num_blocks = len(group.blocks)
            pause(sequence)
            self._shares(lane).note(group, -1, len(group.blocks) - num_blocks)
            lane.favoured |= {want.group.request.client: lane.num_steps + CALM_STEPS for want in wants}
            lane.has_taken = True

    def _next_to_preempt(self, lane: Lane, wants: list[_WantedRows]) -> Sequence | None:
        """Return the sequence whose row is taken next: of the caller with the most rows, batch and newest first."""
        shares, wanting = self._shares(lane), wants[0].group.request.client
        exceeds = shares.exceeds_rows if self._lacks_rows(lane, wants) else shares.exceeds_blocks
        pausable = [sequence for sequence in lane.rows.sequences if sequence.group.can_pause]
        candidates = [sequence for sequence in pausable if exceeds(client := _client(sequence)) and client != wanting]
        return max(
            candidates,
            key=lambda sequence: (shares.rows[_client(sequence)], *_age(sequence), sequence.index),
            default=None,
        )


def _age(sequence: Sequence) -> tuple[bool, int]:
    return sequence.group.age


def _client(sequence: Sequence) -> str:
    return sequence.group.request.client
