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
from collections.abc import Collection, Iterator
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


class FairOrder:
    """Groups of a fair queue in order of service.

    next: the group that is served next; None after the last.
    """

    def __init__(self, turns: list[_Turn], next_ticket: int) -> None:
        """turns: a heap, which the iteration changes. next_ticket: first ticket that no client has."""
        self.next: SequenceGroup | None = None
        self._turns = turns
        self._next_ticket = next_ticket
        self._begun: dict[int, Iterator[SequenceGroup]] = {}  # by ticket: later groups of a client that had a turn
        self._start = 0.0
        self._client: _Client | None = None
        self._groups: Iterator[SequenceGroup] = iter(())  # later groups of the same client
        self.skip_client()

    def serve(self) -> None:
        """Go on as if the next group were served: the next turn of its client starts later by the group's cost."""
        assert self.next is not None
        assert self._client is not None
        heapq.heappush(self._turns, (self._start + self.next.cost, self._next_ticket, self._client))
        self._begun[self._next_ticket] = self._groups
        self._next_ticket += 1
        self.skip_client()

    def skip_client(self) -> None:
        """Leave out the next group, and the later groups of its client."""
        self.next = None
        while self._turns and self.next is None:
            self._start, ticket, client = heapq.heappop(self._turns)
            groups = self._begun.pop(ticket, None)
            if groups is None:
                if ticket != client.ticket:
                    continue
                groups = iter(client.waiting.values())
            self._client, self._groups = client, groups
            self.next = next(groups, None)


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
        entry = self._clients.get(client)
        return ClientTotals(len(entry.waiting), entry.num_source_tokens, entry.cost) if entry else ClientTotals(0, 0, 0)

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

    def in_order(self) -> FairOrder:
        """Return the groups in order of service. The queue must not change during the iteration."""
        return FairOrder(self._turns.copy(), self._next_ticket)

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
        while self._turns and self._turns[0][1] != self._turns[0][2].ticket:  # else every iteration passes them
            heapq.heappop(self._turns)

    def _turn(self, client: _Client, start: float) -> None:
        client.start, client.ticket = start, self._next_ticket
        self._next_ticket += 1
        if len(self._turns) > 2 * len(self._clients) + 16:  # most are stale
            self._turns = [
                (other.start, other.ticket, other) for other in self._clients.values() if other is not client
            ]
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


class OrderOfService:
    """Iterator over waiting groups in order of service, as if every one were served that is not skipped."""

    def __init__(
        self, preempted: list[SequenceGroup], interactive: FairOrder, batch: FairOrder, batch_debt: int
    ) -> None:
        self._preempted = preempted[::-1]
        self._interactive = interactive
        self._batch = batch
        self._batch_debt = batch_debt
        self._last: FairOrder | None = None  # of the last group; None if it was preempted or skipped

    def __iter__(self) -> OrderOfService:
        return self

    def __next__(self) -> SequenceGroup:
        self._serve_last()
        if self._preempted:
            return self._preempted.pop()
        first, second = self._interactive.next, self._batch.next
        if second is not None and (first is None or self._batch_debt >= INTERACTIVE_SHARE * second.cost):
            self._last = self._batch
            return second
        if first is None:
            raise StopIteration
        self._last = self._interactive
        return first

    def skip_client(self) -> None:
        """Leave out the last group. If it is new, leave out the later groups of its client and priority too."""
        if self._last is not None:
            self._last.skip_client()
            self._last = None

    def _serve_last(self) -> None:
        order, self._last = self._last, None
        if order is None or order.next is None:
            return
        if order is self._batch:
            self._batch_debt = max(0, self._batch_debt - INTERACTIVE_SHARE * order.next.cost)
        else:
            self._batch_debt += order.next.cost
        order.serve()


class ServiceOrder:
    """Waiting groups in the order in which they are served.

    preempted_cost, new_cost: total cost of the preempted groups, and of the others.
    """

    def __init__(self) -> None:
        self._preempted: dict[str, SequenceGroup] = {}  # in the order in which they continue
        self._queues = {priority: FairQueue() for priority in Priority}
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
        return sum(queue.cost for queue in self._queues.values())

    @property
    def clients(self) -> set[str]:
        """Clients with a waiting request, preempted or new."""
        preempted = {group.request.client for group in self._preempted.values()}
        return preempted | self.new_clients

    @property
    def new_clients(self) -> set[str]:
        """Clients with a waiting request that has never run."""
        return set().union(*(queue.clients for queue in self._queues.values()))

    def totals_of(self, client: str) -> list[ClientTotals]:
        """Return the new requests of a client, one entry for each priority."""
        return [queue.totals_of(client) for queue in self._queues.values()]

    def add(self, group: SequenceGroup) -> None:
        """Append a new group to its client's requests."""
        self._queues[group.request.priority].add(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Add a preempted group: interactive before batch, then the oldest first."""
        preempted = [*self._preempted.values(), group]
        preempted.sort(key=lambda waiting: waiting.age)
        self._preempted = {waiting.request_id: waiting for waiting in preempted}

    def take(self, group: SequenceGroup) -> bool:
        """Remove a group in order to serve it. Return True for a new one, False for a preempted one."""
        if self._preempted.pop(group.request_id, None) is not None:
            return False
        self._queues[group.request.priority].take(group)
        self._count_served(group)
        return True

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without serving it."""
        if self._preempted.pop(group.request_id, None) is None:
            self._queues[group.request.priority].remove(group)
            if not self._queues[Priority.BATCH]:
                self._batch_debt = 0

    def in_order(self) -> OrderOfService:
        """Return every group in order of service. The queue must not change during the iteration."""
        queues = self._queues
        return OrderOfService(
            list(self._preempted.values()),
            queues[Priority.INTERACTIVE].in_order(),
            queues[Priority.BATCH].in_order(),
            self._batch_debt,
        )

    def cost_before(self, entry: QueueEntry) -> int:
        """Return the cost of the new groups that would be served before a new entry."""
        queue = self._queues[entry.priority]
        totals = queue.totals_of(entry.client)
        own = totals.cost + entry.cost
        num_others = len(queue.clients) - (totals.num_requests > 0)
        ahead = totals.cost + min(queue.cost - totals.cost, num_others * own)
        if entry.priority is Priority.BATCH:
            return ahead + min(self._queues[Priority.INTERACTIVE].cost, INTERACTIVE_SHARE * (ahead + entry.cost))
        return ahead + min(self._queues[Priority.BATCH].cost, ahead // INTERACTIVE_SHARE)

    def _count_served(self, group: SequenceGroup) -> None:
        """Count the cost of a served group for the share of the batch groups."""
        if not self._queues[Priority.BATCH]:
            self._batch_debt = 0
        elif group.request.priority is Priority.BATCH:
            self._batch_debt = max(0, self._batch_debt - INTERACTIVE_SHARE * group.cost)
        else:
            self._batch_debt += group.cost
