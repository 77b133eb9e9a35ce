"""Requests that wait: whose turn it is, and how many may wait, so that overload is refused and not hoarded.

Those that were preempted come first; then interactive ones, with a share for the batch; inside a priority clients take
turns. Bounded by requests, by source tokens, by time, and by what one client may hold of a queue that fills up.
Written to by any thread, drained by the engine's. Refuses to know rows, blocks and why a request is taken out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from antiphon.service.domain.errors import DeadlineExceeded, QueueFull, Unavailable
from antiphon.service.domain.request import Priority
from antiphon.service.engine.queue.drain_rate import AnswerPace, DrainRate
from antiphon.service.engine.queue.fair_line import FairLine
from antiphon.service.engine.sequence import SequenceGroup

# Bounds of the retry advice: long enough not to hammer, short enough not to idle a replica that has recovered.
MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0
# While both wait, the batch is served one part of the cost to so many of the interactive.
INTERACTIVE_SHARE = 7
# The last part in so many of either bound is kept for clients that hold less than their fair share of it.
RESERVED_SHARE = 4
# What is left of a deadline must be more by this factor than the expected wait and answer: who is let in to miss it
# takes the place of one that would not, and a queue at the very limit is full of those.
DEADLINE_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Most requests that wait, most source tokens they hold together, longest expected wait; None is no limit."""

    max_requests: int
    max_source_tokens: int
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_source_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s is {self.max_wait_s}; it must be above 0")


class _Newcomer(NamedTuple):
    """What decides whether a request is taken: who asks, how urgently, for how much."""

    client: str
    priority: Priority
    num_source_tokens: int
    cost: int


class RequestQueue:
    """Bounded queue of waiting groups; every method is safe from any thread."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[str, SequenceGroup] = {}  # insertion order is arrival order
        self._preempted: dict[str, SequenceGroup] = {}  # of those, in the order in which they go on
        self._lines = {priority: FairLine() for priority in Priority}
        self._yielded = 0  # cost of the interactive served while the batch waited, not yet made up for
        self._drain = DrainRate()
        self._pace = AnswerPace()
        self._num_source_tokens = 0
        self._expiries: list[tuple[float, int, SequenceGroup]] = []  # a heap; may name some that wait no more
        self._tickets = itertools.count()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_source_tokens(self) -> int:
        """Source tokens that wait to be encoded."""
        return self._num_source_tokens

    @property
    def num_preempted(self) -> int:
        """Those of the waiting that ran before."""
        return len(self._preempted)

    def check_room(self, client: str, priority: Priority, now_s: float) -> None:
        """Raise as put would for the least of requests: it spares the work of reading one that cannot be taken."""
        with self._lock:
            self._check(_Newcomer(client, priority, 1, 1), now_s)

    def put(self, group: SequenceGroup, now_s: float) -> None:
        """Append a group. Raises Unavailable once closed, QueueFull at a bound, DeadlineExceeded for a hopeless one.

        A source longer than the token bound is still taken by an empty queue: it could never enter otherwise.
        """
        request = group.request
        newcomer = _Newcomer(request.client, request.priority, request.num_source_tokens, group.cost)
        with self._lock:
            self._check(newcomer, now_s)
            self._check_time(group, newcomer, now_s)
            self._lines[group.request.priority].add(group)
            self._add(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Let a preempted group wait before all new ones, whatever the bounds: interactive first, then the oldest."""
        with self._lock:
            self._add(group)
            held = [*self._preempted.values(), group]
            held.sort(key=lambda one: (one.request.priority is Priority.BATCH, one.ticket))
            self._preempted = {one.request_id: one for one in held}

    def peek(
        self, max_groups: int, may_join: Callable[[SequenceGroup], bool] = lambda group: True
    ) -> list[SequenceGroup]:
        """The groups that are to be served next, in that order, left where they are.

        may_join: asked for each in its turn; where it says no, that client's later new groups are left out too.
        """
        with self._lock:
            return list(itertools.islice(self._in_turn(may_join), max_groups))

    @property
    def clients(self) -> set[str]:
        """Clients with a waiting request."""
        with self._lock:
            preempted = {group.request.client for group in self._preempted.values()}
            return preempted.union(*(line.clients for line in self._lines.values()))

    def take(self, request_id: str, now_s: float) -> SequenceGroup | None:
        """Take out one group that is served now; None when it does not wait here."""
        with self._lock:
            group = self._waiting.get(request_id)
            if group is None:
                return None
            self._forget(group)
            is_new = self._preempted.pop(request_id, None) is None
            if is_new:
                self._lines[group.request.priority].take(group)
                self._settle(group)
            self._drain.left(group.cost if is_new else 0, now_s, is_last=not self._waiting)
            return group

    def remove(self, request_id: str) -> SequenceGroup | None:
        """Take out one group that is not served; None when it does not wait here."""
        with self._lock:
            group = self._waiting.get(request_id)
            if group is not None:
                self._drop(group)
            return group

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Take out every group whose deadline or time limit has come, the earliest first."""
        expiries = self._expiries
        if not expiries or now_s < expiries[0][0]:  # spares the lock; what is put meanwhile can wait
            return []
        with self._lock:
            late = []
            while self._expiries and self._expiries[0][0] <= now_s:
                group = heapq.heappop(self._expiries)[2]
                if self._waiting.get(group.request_id) is group:
                    self._drop(group)
                    late.append(group)
            return late

    def answered(self, run_s: float, num_tokens: int) -> None:
        """Note how long a request that was taken ran, and the tokens of its answer."""
        with self._lock:
            self._pace.answered(run_s, num_tokens)

    def expected_wait_s(self, now_s: float) -> float | None:
        """How long it would take to serve all that wait; None without evidence, 0 where none waits."""
        with self._lock:
            cost = sum(line.cost for line in self._lines.values())
            return self._seconds(cost, now_s) if cost else 0.0

    def close(self) -> None:
        """Refuse every later put; what waits stays."""
        with self._lock:
            self._is_closed = True

    def _in_turn(self, may_join: Callable[[SequenceGroup], bool]) -> Iterator[SequenceGroup]:
        """All that wait and may join, as `_settle` will have it."""
        yield from filter(may_join, self._preempted.values())
        interactive = self._lines[Priority.INTERACTIVE].in_turn(may_join)
        batch = self._lines[Priority.BATCH].in_turn(may_join)
        yielded, first, second = self._yielded, next(interactive, None), next(batch, None)
        while first is not None or second is not None:
            if second is not None and (first is None or yielded >= INTERACTIVE_SHARE * second.cost):
                yield second
                yielded, second = max(0, yielded - INTERACTIVE_SHARE * second.cost), next(batch, None)
            elif first is not None:
                yield first
                yielded, first = yielded + first.cost, next(interactive, None)

    def _settle(self, group: SequenceGroup) -> None:
        """Note who has been served, for the share of the batch."""
        if not self._lines[Priority.BATCH]:
            self._yielded = 0
        elif group.request.priority is Priority.BATCH:
            self._yielded = max(0, self._yielded - INTERACTIVE_SHARE * group.cost)
        else:
            self._yielded += group.cost

    def _add(self, group: SequenceGroup) -> None:
        self._waiting[group.request_id] = group
        self._num_source_tokens += group.request.num_source_tokens
        if group.expires_s < math.inf:
            if len(self._expiries) > 2 * len(self._waiting) + 64:  # most wait no more
                self._expiries = [one for one in self._expiries if self._waiting.get(one[2].request_id) is one[2]]
                heapq.heapify(self._expiries)
            heapq.heappush(self._expiries, (group.expires_s, next(self._tickets), group))

    def _forget(self, group: SequenceGroup) -> None:
        del self._waiting[group.request_id]
        self._num_source_tokens -= group.request.num_source_tokens

    def _drop(self, group: SequenceGroup) -> None:
        """Take out a group that is not served."""
        self._forget(group)
        if self._preempted.pop(group.request_id, None) is None:
            self._lines[group.request.priority].remove(group)
            if not self._lines[Priority.BATCH]:
                self._yielded = 0
        if not self._waiting:
            self._drain.emptied()

    def _check(self, newcomer: _Newcomer, now_s: float) -> None:
        """Raise where it may not wait."""
        if self._is_closed:
            raise Unavailable("the server is shutting down and takes no new requests")
        if self._waiting:
            self._check_bounds(newcomer, now_s)

    def _check_bounds(self, newcomer: _Newcomer, now_s: float) -> None:
        limits, num_source_tokens = self._limits, newcomer.num_source_tokens
        wait_s: float | None = None
        if len(self._waiting) >= limits.max_requests:
            message = f"{len(self._waiting)} requests wait already"
        elif self._num_source_tokens + num_source_tokens > limits.max_source_tokens:
            message = f"{self._num_source_tokens} source tokens wait already"
        elif self._exceeds_share(newcomer):
            message = "more requests of this client wait already than its share of a queue that fills up"
        elif limits.max_wait_s is not None and (wait_s := self._wait_s(newcomer, now_s) or 0.0) > limits.max_wait_s:
            message = f"it would wait for about {wait_s:.1f} s, longer than the {limits.max_wait_s:g} s allowed"
        else:
            return
        wait_s = wait_s or self._wait_s(newcomer, now_s)
        if wait_s is None:  # what the oldest has waited is about what the queue takes to turn over
            wait_s = now_s - next(iter(self._waiting.values())).request.arrival_s
        raise QueueFull(message, retry_after_s=min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))

    def _check_time(self, group: SequenceGroup, newcomer: _Newcomer, now_s: float) -> None:
        deadline_s = group.request.deadline_s
        if deadline_s is None or not self._waiting:
            return
        wait_s = self._wait_s(newcomer, now_s)
        if wait_s is None:
            return
        answer_s = self._pace.seconds(group.expected_target_len)
        if DEADLINE_MARGIN * (wait_s + answer_s) > deadline_s - now_s:
            raise DeadlineExceeded(
                f"it would wait for about {wait_s:.2g} s and take {answer_s:.2g} s, and its deadline comes before"
            )

    def _exceeds_share(self, newcomer: _Newcomer) -> bool:
        """Whether the queue has only room left that is kept for clients which hold less than this one."""
        limits, num_tokens = self._limits, newcomer.num_source_tokens
        is_reserved = _is_reserved(len(self._waiting) + 1, limits.max_requests)
        are_reserved = _is_reserved(self._num_source_tokens + num_tokens, limits.max_source_tokens)
        if not (is_reserved or are_reserved):
            return False
        lines = self._lines.values()
        held = [line.held_by(newcomer.client) for line in lines]
        others = {name for line in lines for name in line.clients} - {newcomer.client}
        shares = 1 + max(1, len(others))  # somebody else may come
        requests = 1 + sum(one.num_requests for one in held)
        tokens = num_tokens + sum(one.num_source_tokens for one in held)
        return (is_reserved and requests * shares > limits.max_requests) or (
            are_reserved and tokens * shares > limits.max_source_tokens
        )

    def _wait_s(self, newcomer: _Newcomer, now_s: float) -> float | None:
        """How long a newcomer would wait for its turn; None without evidence."""
        line = self._lines[newcomer.priority]
        held = line.held_by(newcomer.client)
        own = held.cost + newcomer.cost
        others = len(line.clients) - (held.num_requests > 0)
        ahead = held.cost + min(line.cost - held.cost, others * own)
        if newcomer.priority is Priority.BATCH:
            ahead += min(self._lines[Priority.INTERACTIVE].cost, INTERACTIVE_SHARE * (ahead + newcomer.cost))
        else:
            ahead += min(self._lines[Priority.BATCH].cost, ahead // INTERACTIVE_SHARE)
        return self._seconds(ahead, now_s)

    def _seconds(self, cost: int, now_s: float) -> float | None:
        """How long it takes to serve so much, preempted requests first."""
        rate = self._drain.per_second(now_s)
        if rate is None:
            return None
        cost += sum(group.cost for group in self._preempted.values())
        return cost / max(rate, 1e-9)


def _is_reserved(taken: int, most: int) -> bool:
    """Whether the last of so many is within what is kept for clients that hold little."""
    return taken > most - most // RESERVED_SHARE
