"""Bounded queue of waiting requests.

Any thread may add requests; the engine's thread takes them. A full queue refuses further requests.
Knows no rows, no blocks and no reason why a request is taken out.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from antiphon.domain.errors import Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Priority
from antiphon.engine.queue.bounds import QueueBounds
from antiphon.engine.queue.service_order import Newcomer, ServiceOrder
from antiphon.engine.queue.wait_times import WaitTimes
from antiphon.engine.queue.waiting_groups import WaitingGroups
from antiphon.engine.sequences.sequence import SequenceGroup


class RequestQueue:
    """Bounded queue of waiting groups; every method is safe from any thread."""

    def __init__(self, limits: EngineLimits) -> None:
        self._lock = threading.Lock()
        self._groups = WaitingGroups()
        self._order = ServiceOrder()
        self._times = WaitTimes(self._order)
        self._bounds = QueueBounds(limits, self._groups, self._order, self._times)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_source_tokens(self) -> int:
        """Source tokens of the waiting requests."""
        return self._groups.num_source_tokens

    @property
    def num_preempted(self) -> int:
        """Waiting groups that ran before."""
        return self._order.num_preempted

    @property
    def clients(self) -> set[str]:
        """Clients with a waiting request."""
        with self._lock:
            return self._order.clients

    def check_room(self, client: str, priority: Priority, now_s: float) -> None:
        """Raise as `put` would for the smallest request, so that a request is not read if it would be refused."""
        with self._lock:
            self._check(Newcomer(client, priority, 1, 1), now_s)

    def put(self, group: SequenceGroup, now_s: float) -> None:
        """Append a group.

        Raises Unavailable once closed, QueueFull at a bound, DeadlineExceeded for a group that is expected to miss its
        deadline. An empty queue also takes a source longer than the token bound; otherwise it could never be served.
        """
        request = group.request
        newcomer = Newcomer(request.client, request.priority, request.num_source_tokens, group.cost)
        with self._lock:
            self._check(newcomer, now_s)
            self._bounds.check_deadline(group, newcomer, now_s)
            self._order.add(group)
            self._groups.add(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Add a preempted group before all new ones; no bound applies."""
        with self._lock:
            self._groups.add(group)
            self._order.put_back(group)

    def peek(
        self, max_groups: int, may_join: Callable[[SequenceGroup], bool] = lambda group: True
    ) -> list[SequenceGroup]:
        """Return the groups in order of service, without taking them out.

        may_join: called for each group in its turn. If it returns False, the later new groups of the same client are
            left out too.
        """
        with self._lock:
            return list(itertools.islice(self._order.in_turn(may_join), max_groups))

    def take(self, request_id: str, now_s: float) -> SequenceGroup | None:
        """Take out one group in order to serve it; None if it does not wait here."""
        with self._lock:
            group = self._groups.get(request_id)
            if group is None:
                return None
            self._groups.remove(group)
            cost = group.cost if self._order.take(group) else 0
            self._times.drain.left(cost, now_s, is_last=not self._groups)
            return group

    def remove(self, request_id: str) -> SequenceGroup | None:
        """Take out one group without serving it; None if it does not wait here."""
        with self._lock:
            group = self._groups.get(request_id)
            if group is not None:
                self._groups.remove(group)
                self._leave_unserved(group)
            return group

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Take out every group whose deadline or time limit has come, the earliest first."""
        if now_s < self._groups.next_expiry_s:  # avoids the lock; the next call finds a group that is added now
            return []
        with self._lock:
            late = self._groups.take_expired(now_s)
            for group in late:
                self._leave_unserved(group)
            return late

    def answered(self, run_s: float, num_tokens: int) -> None:
        """Record the running time of a request that was taken, and the tokens of its answer."""
        with self._lock:
            self._times.pace.answered(run_s, num_tokens)

    def expected_wait_s(self, now_s: float) -> float | None:
        """Return the time to serve all waiting groups; None without evidence, 0 if no group waits."""
        with self._lock:
            return self._times.until_empty_s(now_s)

    def close(self) -> None:
        """Refuse every later `put`; waiting groups stay."""
        with self._lock:
            self._is_closed = True

    def _check(self, newcomer: Newcomer, now_s: float) -> None:
        if self._is_closed:
            raise Unavailable("the server is shutting down and takes no new requests")
        self._bounds.check_room(newcomer, now_s)

    def _leave_unserved(self, group: SequenceGroup) -> None:
        self._order.remove(group)
        if not self._groups:
            self._times.drain.emptied()
