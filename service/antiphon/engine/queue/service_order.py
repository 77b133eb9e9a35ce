"""Order in which waiting groups are served.

Preempted groups come first, then interactive ones. Batch groups get a share while interactive ones wait. Clients of one
priority take turns. Knows no bounds, no clock and no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from antiphon.domain.request import Priority
from antiphon.engine.queue.fair_line import ClientTotals, FairLine
from antiphon.engine.sequences.sequence import SequenceGroup

# While both priorities wait, batch groups get 1 part of the served cost, interactive ones get this number of parts.
INTERACTIVE_SHARE = 7


class Newcomer(NamedTuple):
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
        self._lines = {priority: FairLine() for priority in Priority}
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

    def cost_before(self, newcomer: Newcomer) -> int:
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
