"""Order in which waiting requests are served.

Preempted groups come first, then interactive ones. Batch groups get a share while interactive ones wait. Clients of one
priority take turns by the cost of their requests, each client's own in order: start-time fair queueing (Goyal, Vin and
Cheng 1996) with equal weights. In virtual time, a client's next request starts when its last served one ended, and not
before the present. The request that starts first is served first. Start times belong to clients, not to requests: a
request that leaves unserved costs its client nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from antiphon.domain.request import Priority
from antiphon.engine.sequence import SequenceGroup

# Maximum number of clients without a waiting request whose last virtual end is kept.
MAX_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class _Client:
    """A client with waiting requests, in order of arrival, and their total cost."""

    start: float
    ticket: int
    waiting: dict[str, SequenceGroup] = field(default_factory=dict)
    cost: int = 0
    num_source_tokens: int = 0


_Turn = tuple[float, int, _Client]
"""Virtual start of a client's next request, a ticket, and the client; stale if the client has another ticket."""


@dataclass(frozen=True, slots=True)
class ClientTotals:
    """Waiting requests of one client: their number, source tokens and cost."""

    num_requests: int
    num_source_tokens: int
    cost: int


class FairQueue:
    """The waiting groups of one priority."""

    def __init__(self) -> None:
        self.cost = 0
        self._clients: dict[str, _Client] = {}
        self._turns: list[_Turn] = []  # a heap
        self._now = 0.0  # virtual time: start of the request that was served last
        self._ends: dict[str, float] = {}  # virtual end of clients without a waiting request, if after now
        self._next_ticket = 0

    def __bool__(self) -> bool:
        return bool(self._clients)

    @property
    def clients(self) -> Collection[str]:
        """Clients with a waiting request."""
        return self._clients.keys()

    def totals_of(self, client: str) -> ClientTotals:
        """Return the waiting requests of a client."""
        found = self._clients.get(client)
        return ClientTotals(len(found.waiting), found.num_source_tokens, found.cost) if found else ClientTotals(0, 0, 0)

    def add(self, group: SequenceGroup) -> None:
        """Append a group to its client's requests."""
        name = group.request.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(start=0.0, ticket=0)
            self._turn(client, max(self._now, self._ends.pop(name, 0.0)))
        client.waiting[group.request_id] = group
        self._count(client, group, 1)

    def take(self, group: SequenceGroup) -> None:
        """Remove a group in order to serve it."""
        start = self._clients[group.request.client].start
        self._now = max(self._now, start)
        self._leave(group, start + group.cost)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without serving it."""
        self._leave(group, self._clients[group.request.client].start)

    def in_turn(self, may_join: Callable[[SequenceGroup], bool]) -> Iterator[SequenceGroup]:
        """Return every group in order of service. The queue must not change during the iteration.

        may_join: called for each group in its turn. If it returns False, this group and the later groups of the same
                client are left out.
        """
        turns, tickets = self._turns.copy(), itertools.count(self._next_ticket)
        begun: dict[int, Iterator[SequenceGroup]] = {}  # by ticket: further groups of a client that had a turn
        while turns:
            start, ticket, client = heapq.heappop(turns)
            groups = begun.pop(ticket, None)
            if groups is None:
                if ticket != client.ticket:
                    continue
                groups = iter(client.waiting.values())
            if (group := next(groups, None)) is not None and may_join(group):
                yield group
                begun[again := next(tickets)] = groups
                heapq.heappush(turns, (start + group.cost, again, client))

    def _leave(self, group: SequenceGroup, end: float) -> None:
        name = group.request.client
        client = self._clients[name]
        del client.waiting[group.request_id]
        self._count(client, group, -1)
        if not client.waiting:
            client.ticket = -1  # its turn is stale
            del self._clients[name]
            self._remember(name, end)
        elif end != client.start:
            self._turn(client, end)
        while self._turns and self._turns[0][1] != self._turns[0][2].ticket:  # else every `in_turn` passes them
            heapq.heappop(self._turns)

    def _turn(self, client: _Client, start: float) -> None:
        client.start, client.ticket = start, self._next_ticket
        self._next_ticket += 1
        if len(self._turns) > 2 * len(self._clients) + 16:  # most are stale
            self._turns = [(one.start, one.ticket, one) for one in self._clients.values() if one is not client]
            heapq.heapify(self._turns)
        heapq.heappush(self._turns, (start, client.ticket, client))

    def _remember(self, name: str, end: float) -> None:
        if not self._clients:  # no client has an advantage over others
            self._now = 0.0
            self._turns.clear()
            self._ends.clear()
        elif end > self._now:
            self._ends[name] = end
            if len(self._ends) > MAX_REMEMBERED:
                self._ends = dict(itertools.islice(self._ends.items(), MAX_REMEMBERED // 2, None))

    def _count(self, client: _Client, group: SequenceGroup, sign: int) -> None:
        client.cost += sign * group.cost
        client.num_source_tokens += sign * group.request.num_source_tokens
        self.cost += sign * group.cost


# While both priorities wait, batch groups get 1 part of the served cost, interactive ones get this number of parts.
INTERACTIVE_SHARE = 7


class QueueEntry(NamedTuple):
    """Properties of an arriving request from which the queue decides to accept it."""

    client: str
    priority: Priority
    num_source_tokens: int
    cost: int


class ServiceOrder:
    """Waiting groups in the order in which they are served.

    preempted_cost, new_cost: total cost of the preempted groups, and of the others.
    """

    def __init__(self) -> None:
        self._preempted: dict[str, SequenceGroup] = {}  # in the order in which they continue
        self._lines = {priority: FairQueue() for priority in Priority}
        self._batch_debt = 0  # cost of interactive groups served while batch groups waited, minus the batch's share

    @property
    def num_preempted(self) -> int:
        """Waiting groups that ran before."""
        return len(self._preempted)

    @property
    def preempted_cost(self) -> int:
        """Cost of the preempted groups."""
        return sum(group.cost for group in self._preempted.values())

    @property
    def new_cost(self) -> int:
        """Cost of the groups that have never run."""
        return sum(line.cost for line in self._lines.values())

    @property
    def clients(self) -> set[str]:
        """Clients with a waiting request, preempted or new."""
        preempted = {group.request.client for group in self._preempted.values()}
        return preempted | self.new_clients

    @property
    def new_clients(self) -> set[str]:
        """Clients with a waiting request that has never run."""
        return set().union(*(line.clients for line in self._lines.values()))

    def totals_of(self, client: str) -> list[ClientTotals]:
        """Return the new requests of a client, one entry for each priority."""
        return [line.totals_of(client) for line in self._lines.values()]

    def add(self, group: SequenceGroup) -> None:
        """Append a new group to its client's requests."""
        self._lines[group.request.priority].add(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Add a preempted group: interactive before batch, then the oldest first."""
        preempted = [*self._preempted.values(), group]
        preempted.sort(key=lambda one: (one.request.priority is Priority.BATCH, one.ticket))
        self._preempted = {one.request_id: one for one in preempted}

    def take(self, group: SequenceGroup) -> bool:
        """Remove a group in order to serve it. Return True for a new one, False for a preempted one."""
        if self._preempted.pop(group.request_id, None) is not None:
            return False
        self._lines[group.request.priority].take(group)
        self._count_served(group)
        return True

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without serving it."""
        if self._preempted.pop(group.request_id, None) is None:
            self._lines[group.request.priority].remove(group)
            if not self._lines[Priority.BATCH]:
                self._batch_debt = 0

    def in_turn(self, may_join: Callable[[SequenceGroup], bool]) -> Iterator[SequenceGroup]:
        """Return every group that may join, in order of service. The queue must not change during the iteration."""
        yield from filter(may_join, self._preempted.values())
        interactive = self._lines[Priority.INTERACTIVE].in_turn(may_join)
        batch = self._lines[Priority.BATCH].in_turn(may_join)
        debt, first, second = self._batch_debt, next(interactive, None), next(batch, None)
        while first is not None or second is not None:
            if second is not None and (first is None or debt >= INTERACTIVE_SHARE * second.cost):
                yield second
                debt, second = max(0, debt - INTERACTIVE_SHARE * second.cost), next(batch, None)
            elif first is not None:
                yield first
                debt, first = debt + first.cost, next(interactive, None)

    def cost_before(self, newcomer: QueueEntry) -> int:
        """Return the cost of the new groups that would be served before a newcomer."""
        line = self._lines[newcomer.priority]
        totals = line.totals_of(newcomer.client)
        own = totals.cost + newcomer.cost
        others = len(line.clients) - (totals.num_requests > 0)
        ahead = totals.cost + min(line.cost - totals.cost, others * own)
        if newcomer.priority is Priority.BATCH:
            return ahead + min(self._lines[Priority.INTERACTIVE].cost, INTERACTIVE_SHARE * (ahead + newcomer.cost))
        return ahead + min(self._lines[Priority.BATCH].cost, ahead // INTERACTIVE_SHARE)

    def _count_served(self, group: SequenceGroup) -> None:
        """Count the cost of a served group for the share of the batch groups."""
        if not self._lines[Priority.BATCH]:
            self._batch_debt = 0
        elif group.request.priority is Priority.BATCH:
            self._batch_debt = max(0, self._batch_debt - INTERACTIVE_SHARE * group.cost)
        else:
            self._batch_debt += group.cost
