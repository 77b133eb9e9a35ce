"""Fair division of rows among callers: gives free rows to outputs, and takes rows from callers above their share.

A caller may hold more than its share (shares.py) only while no caller within its share wants rows. Free rows go first
to callers within their shares. If such callers receive no row for PATIENCE_STEPS, rows are taken from the caller that
holds the most: batch before interactive, the newest request first. A preempted output continues later with the same
tokens. Each taken row therefore costs the tokens that it must feed again, and sometimes the encoding of its source. To
bound this cost, rows beyond a share are given again only when none has been taken for CALM_STEPS.

A request of several samples runs with the rows that are free; its other outputs wait here. A beam search keeps all its
rows until its end, as does every request on graphs that cannot resume from a cache. One caller receives at most seven
in eight of all rows in this way, except for its first request. Ends nothing; knows no events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Priority, Task
from antiphon.engine.batch import RunningRows
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.reservations import Reservations
from antiphon.engine.scheduler import MAX_DEFERRED_STEPS
from antiphon.engine.sequence import Sequence, SequenceGroup

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


# A row that becomes free without preemption costs nothing. The scheduler waits up to MAX_DEFERRED_STEPS for several of
# them, so no row is taken before that.
PATIENCE_STEPS = MAX_DEFERRED_STEPS + 1
# If a caller asks for one short answer after another, a row that was taken for it stays free for its next request.
CALM_STEPS = 32


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Rows that a group wants within its caller's share, and blocks that it needs to receive any of them."""

    group: SequenceGroup
    num_rows: int
    num_blocks: int


class RowTurns:
    """Division of the rows of one lane of an engine among callers, whose shares are of the rows of all lanes.

    lanes: the turns of all lanes, in order; this one adds itself.
    has_taken: rows were taken at this step, so groups that want them should join at once.
    is_blocked: an output of a running group found a free row, but too few blocks or tokens left in this step; or a
        search found fewer free rows than it has beams.
    """

    def __init__(
        self,
        rows: RunningRows,
        reservations: Reservations,
        queue: RequestQueue,
        limits: EngineLimits,
        lanes: list[RowTurns] | None = None,
    ) -> None:
        self._lanes = lanes if lanes is not None else []
        self._lanes.append(self)
        self._rows = rows
        self._reservations = reservations
        self._queue = queue
        self._limits = limits
        self._admitted: dict[str, SequenceGroup] = {}  # groups that hold rows or blocks
        self._callers: Counter[str] = Counter()  # number of these groups, by caller
        self._pending: dict[str, SequenceGroup] = {}  # running groups with outputs that wait for rows
        self._encoding: dict[str, SequenceGroup] = {}  # admitted groups that have no rows yet
        self._step = 0
        self._num_unserved = 0  # steps in a row in which callers within their share wanted rows and received none
        self._favoured: dict[str, int] = {}  # callers for whom rows were taken, and the step until which this counts
        self._known: Shares | None = None  # shares at this step, computed when first needed
        self._budget = limits.max_num_batched_tokens  # tokens left for outputs that start at this step
        self.has_taken = self.is_blocked = False

    def __bool__(self) -> bool:
        """Return whether outputs of running groups wait for rows."""
        return bool(self._pending)

    @property
    def num_groups(self) -> int:
        """Groups of this lane that hold rows or blocks."""
        return len(self._admitted)

    @property
    def admitted(self) -> tuple[SequenceGroup, ...]:
        """Groups of this lane that hold rows or blocks, in the order in which they joined."""
        return tuple(self._admitted.values())

    def wait(self, group: SequenceGroup) -> None:
        """Add a running group whose pending outputs wait for rows."""
        if group.pending:
            self._pending[group.request_id] = group

    def left(self, group: SequenceGroup) -> None:
        """Forget a group that has ended or waits in the queue again; nothing if it never joined."""
        self._encoding.pop(group.request_id, None)
        self._pending.pop(group.request_id, None)
        if self._admitted.pop(group.request_id, None) is None:
            return
        client = group.request.client
        self._callers[client] -= 1
        if not self._callers[client]:
            del self._callers[client]

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Return the groups with pending outputs whose deadline or time limit has come."""
        return [group for group in self._pending.values() if group.expires_s <= now_s]

    def make_room(self, pause: Callable[[Sequence], None]) -> None:
        """Take rows from callers above their share if others have waited for rows long enough.

        Call it once a step, before any group joins. pause: preempts one output and frees its row and blocks.
        """
        self._step += 1
        self._known, self._budget = None, self._limits.max_num_batched_tokens
        self.has_taken = False
        self._favoured = {caller: until for caller, until in self._favoured.items() if until > self._step}
        if not self._queue and not self._pending:
            self._num_unserved = 0
            return
        wants = self._wants() if self.is_contended and self._shares.is_uneven else []
        if not wants or not self._is_short(wants):
            self._num_unserved = 0
            return
        self._num_unserved += 1
        if self._num_unserved > PATIENCE_STEPS:
            self._take(wants, pause)

    def candidates(self) -> list[SequenceGroup]:
        """Return the groups that may join now: those within their callers' shares, then others if rows are left."""
        count, shares = 1 + self.num_free, self._shares
        if not shares.is_contended:
            return self._queue.peek(count, shares.turn(is_within=False))
        first = self._queue.peek(count, shares.turn(is_within=True))
        if len(first) == count or not self._may_spare:
            return first
        others = [one for one in self._queue.peek(count, shares.turn(is_within=False)) if one not in first]
        return [*first, *others][:count]

    def joined(self, group: SequenceGroup) -> None:
        """Record that a group received its first rows and blocks. Its rows start once its source is encoded."""
        self._encoding[group.request_id] = self._admitted[group.request_id] = group
        self._callers[group.request.client] += 1
        self._note(group, len(group.starting), len(group.blocks))

    def started(self, group: SequenceGroup) -> None:
        """Record that the rows of a group that joined have started; its pending outputs wait for rows."""
        self._encoding.pop(group.request_id, None)
        self._known = None  # other lanes may have changed what they hold while the source was encoded
        self.wait(group)

    def start_pending(self, bos_id: int) -> list[SequenceGroup]:
        """Give free rows to outputs of running groups, the oldest first, within this step's budget of tokens.

        Returns the beam searches that started: their beams start together. Where a caller's group may not start, its
        younger ones of the same kind do not overtake it.
        """
        self.is_blocked = False
        searches: list[SequenceGroup] = []
        refused: set[tuple[str, bool]] = set()  # caller, and whether its groups can pause
        for group in sorted(self._pending.values(), key=_age):
            kind = (group.request.client, group.can_pause)
            while group.pending and kind not in refused and self.num_free:
                if not self._may_start(group):
                    refused.add(kind)
                    break
                self.is_blocked = not self._can_start(group)
                if self.is_blocked:
                    return searches
                self._start_first(group, bos_id)
                if group.is_beam_search:
                    searches.append(group)
            if not group.pending:
                del self._pending[group.request_id]
        return searches

    def _start_first(self, group: SequenceGroup, bos_id: int) -> None:
        """Give a row to the first pending output of a group, or rows to all beams of a search."""
        starting, group.pending = group.pending[: group.num_first_rows], group.pending[group.num_first_rows :]
        for sequence in starting:
            self._reservations.take_output(sequence)
        self._rows.append(starting, bos_id)
        self._note(group, len(starting), len(starting) * group.num_first_blocks)

    def _can_start(self, group: SequenceGroup) -> bool:
        """Return whether a group's next rows can start: rows and blocks are free, and the step's budget is enough.

        Takes the fed tokens from the budget. The first output may take more than the whole budget.
        """
        num_rows, sequence = group.num_first_rows, group.pending[0]
        num_blocks = num_rows * group.num_first_blocks
        if num_rows > self.num_free or num_blocks > self._reservations.num_admissible_blocks:
            return False
        num_fed = num_rows + len(group.request.prefix_ids) + len(sequence.produced)  # one beam feeds the prefix
        is_first = self._budget == self._limits.max_num_batched_tokens
        if num_fed > self._budget and not is_first:
            return False
        self._budget -= num_fed
        return True

    @property
    def num_held(self) -> int:
        """Rows of this lane that are in use, or reserved for groups whose sources are being encoded."""
        return len(self._rows) + sum(len(group.starting) for group in self._encoding.values())

    @property
    def num_free(self) -> int:
        """Free rows that this lane may take now: its part of the work, so that all lanes have equally many rows."""
        held = [lane.num_held for lane in self._lanes]
        num_free = self._limits.max_num_seqs - sum(held)
        if len(held) == 1 or not self._queue:
            return num_free
        num_wanted = min(self._limits.max_num_seqs, sum(held) + len(self._queue))
        num_own = -(-num_wanted // len(held)) - self.num_held
        if self.num_held == min(held):  # a group of several rows may start in the lane with the fewest
            num_own = max(num_own, self._num_next_rows())
        return min(num_free, max(0, num_own))

    def _num_next_rows(self) -> int:
        """Return the rows that the next waiting group, or one that is pending in this lane, needs to start."""
        return max((group.num_first_rows for group in (*self._queue.peek(1), *self._pending.values())), default=0)

    @property
    def _may_spare(self) -> bool:
        """Return whether rows may be given to callers that already hold their share."""
        return not self._favoured

    def _may_start(self, group: SequenceGroup) -> bool:
        """Return whether a group's next rows may start: its caller stays within its share, or no other wants rows."""
        shares, num_rows = self._shares, group.num_first_rows
        if not shares.may_start(group):
            return False
        if not shares.is_contended or shares.has_room(group, num_rows, num_rows * group.num_first_blocks):
            return True
        return self._may_spare and not self._queue.peek(1, shares.turn(is_within=True))

    def _note(self, group: SequenceGroup, num_rows: int, num_blocks: int) -> None:
        self._num_unserved = 0
        self._shares.note(group, num_rows, num_blocks)

    @property
    def _shares(self) -> Shares:
        """Return the rows and blocks that callers hold at this step."""
        if self._known is None:
            self._known = Shares(
                (group for lane in self._lanes for group in lane._admitted.values()),
                self._queue.clients | self._favoured.keys(),
                num_rows=self._limits.max_num_seqs,
                num_blocks=self._reservations.num_blocks,
            )
        return self._known

    @property
    def is_contended(self) -> bool:
        """True if more than one caller holds or wants rows: the answer of `_shares`, which costs more."""
        callers = self._queue.clients | self._favoured.keys()
        return len(callers.union(*(lane._callers for lane in self._lanes))) > 1

    def _wants(self) -> list[_WantedRows]:
        """Return the rows wanted by callers within their shares, in the order in which they are served."""
        wants, taken = [], Counter[str]()
        for group, num_rows, num_blocks in (*self._pending_rows(), *self._waiting_rows()):
            client = group.request.client
            room = max(self._shares.row_room(client), 0 if taken[client] else group.num_first_rows) - taken[client]
            if room > 0:
                wants.append(_WantedRows(group, min(num_rows, room), num_blocks))
                taken[client] += min(num_rows, room)
        return wants

    def _pending_rows(self) -> Iterator[tuple[SequenceGroup, int, int]]:
        """Return pending rows within callers' shares: running group, pending outputs, and blocks of one output."""
        for group in sorted(self._pending.values(), key=_age):
            if self._shares.has_room(group, 1, group.num_first_blocks):
                yield group, len(group.pending), group.num_first_blocks

    def _waiting_rows(self) -> Iterator[tuple[SequenceGroup, int, int]]:
        """Return rows that waiting groups want within callers' shares: group, rows, and blocks that it needs to start.

        A request that is only encoded needs a free row too.
        """
        for group in self._queue.peek(self._limits.max_num_seqs, self._shares.turn(is_within=True)):
            yield group, max(1, group.num_rows), group.num_blocks

    def _is_short(self, wants: list[_WantedRows]) -> bool:
        return self._lacks_rows(wants) or self._lacks_blocks(wants)

    def _lacks_rows(self, wants: list[_WantedRows]) -> bool:
        return sum(want.num_rows for want in wants) > self.num_free

    def _lacks_blocks(self, wants: list[_WantedRows]) -> bool:
        return wants[0].num_blocks > self._reservations.num_admissible_blocks

    def _take(self, wants: list[_WantedRows], pause: Callable[[Sequence], None]) -> None:
        while self._is_short(wants):
            chosen = self._next_to_preempt(wants)
            if chosen is None:
                return
            num_blocks = len(chosen.group.blocks)
            pause(chosen)
            self._shares.note(chosen.group, -1, len(chosen.group.blocks) - num_blocks)
            self._favoured |= {want.group.request.client: self._step + CALM_STEPS for want in wants}
            self.has_taken = True

    def _next_to_preempt(self, wants: list[_WantedRows]) -> Sequence | None:
        """Return the sequence whose row is taken next: of the caller with the most rows, batch and newest first."""
        shares, wanting = self._shares, wants[0].group.request.client
        exceeds = shares.exceeds_rows if self._lacks_rows(wants) else shares.exceeds_blocks
        pausable = [one for one in self._rows.sequences if one.group.can_pause]
        candidates = [one for one in pausable if exceeds(caller := one.group.request.client) and caller != wanting]
        return max(
            candidates,
            key=lambda one: (shares.rows[one.group.request.client], *_age(one.group), one.index),
            default=None,
        )


def _age(group: SequenceGroup) -> tuple[bool, int]:
    """Return the sort key of a group: interactive before batch, then the oldest first."""
    return group.request.priority is Priority.BATCH, group.ticket
