"""Waiting requests of one priority: clients take turns by the cost of their requests, each client's own in order.

Start-time fair queueing (Goyal, Vin and Cheng 1996) with equal weights. In virtual time, a client's next request starts
when its last served one ended, and not before the present. The request that starts first is served first. Start times
belong to clients, not to requests: a request that leaves unserved costs its client nothing. Knows no bounds, no clock
and no lock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from antiphon.engine.sequences.sequence import SequenceGroup

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


class FairLine:
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
