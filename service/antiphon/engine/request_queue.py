"""Bounded queue of waiting requests: bounds of requests, source tokens and expected wait, and times of expiry.

Any thread may add requests; the engine's threads take them. A full queue refuses further requests. A request that finds
the server idle does not show the server's capacity. The rate at which the queue drains is therefore measured only over
intervals at whose start other requests were left waiting.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from antiphon.domain.errors import DeadlineExceeded, QueueFull, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Priority
from antiphon.engine.fair_queue import OrderOfService, QueueEntry, ServiceOrder
from antiphon.engine.sequence import SequenceGroup

# Busy seconds over which the rate is smoothed: longer than one answer, shorter than a change of load.
TIME_CONSTANT_S = 10.0
# Busy seconds and departures below which no rate is given.
MIN_BUSY_S = 1.0
MIN_DEPARTURES = 8
# Answers over which the seconds per token are smoothed.
NUM_ANSWERS = 64


class DrainRate:
    """Exponentially smoothed rate over busy time. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._busy_s = 0.0
        self._num_departures = 0
        self._since_s: float | None = None  # time of the last departure that left others waiting

    def departed(self, cost: float, now_s: float, *, is_last: bool) -> None:
        """Record that a request of this cost has left to be served. is_last: no request waits any more."""
        if self._since_s is not None:
            elapsed_s = now_s - self._since_s
            kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
            self._cost = self._cost * kept + cost
            self._busy_s = _grown(self._busy_s, elapsed_s)
            self._num_departures += 1
        self._since_s = None if is_last else now_s

    def emptied(self) -> None:
        """Record that no request waits any more, although none was served."""
        self._since_s = None

    def per_second(self, now_s: float) -> float | None:
        """Return the served cost per second; None without enough evidence. It falls while no request leaves a queue."""
        idle_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        busy_s = _grown(self._busy_s, idle_s)
        if busy_s < MIN_BUSY_S or self._num_departures < MIN_DEPARTURES:
            return None
        return self._cost * math.exp(-idle_s / TIME_CONSTANT_S) / busy_s


def _grown(busy_s: float, elapsed_s: float) -> float:
    """Return smoothed busy seconds after more of them; never above the time constant."""
    kept = math.exp(-elapsed_s / TIME_CONSTANT_S)
    return busy_s * kept + TIME_CONSTANT_S * (1.0 - kept)


class AnswerPace:
    """Smoothed seconds from admission to the end of an answer, by its length. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._num_answers = 0
        self._token_s = 0.0
        self._num_tokens = 0.0

    def answered(self, run_s: float, num_tokens: int) -> None:
        """Record the running time of an answer and its tokens, the end token included."""
        self._num_answers = min(self._num_answers + 1, NUM_ANSWERS)
        self._token_s += (run_s / max(1, num_tokens) - self._token_s) / self._num_answers
        self._num_tokens += (num_tokens - self._num_tokens) / self._num_answers

    def seconds(self, num_tokens: int) -> float:
        """Return the expected duration of an answer with at most num_tokens tokens; 0 without enough evidence.

        An answer is expected to be no longer than the average one.
        """
        if self._num_answers < MIN_DEPARTURES:
            return 0.0
        return self._token_s * min(num_tokens, self._num_tokens)


class WaitTimes:
    """Expected times until requests are served and answered. Only one thread may use it at a time."""

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self.drain = DrainRate()
        self.pace = AnswerPace()

    def until_empty_s(self, now_s: float) -> float | None:
        """Return the time to serve all waiting groups; None without evidence, 0 if no new group waits."""
        cost = self._order.new_cost
        return self._seconds(cost, now_s) if cost else 0.0

    def of_entry_s(self, entry: QueueEntry, now_s: float) -> float | None:
        """Return the time until an arriving request would be served; None without evidence."""
        return self._seconds(self._order.cost_before(entry), now_s)

    def _seconds(self, cost: int, now_s: float) -> float | None:
        """Return the time to serve this cost after all preempted requests."""
        rate = self.drain.per_second(now_s)
        if rate is None:
            return None
        return (cost + self._order.preempted_cost) / max(rate, 1e-9)


class WaitingGroups:
    """Waiting groups in order of arrival. Only one thread may use it at a time, except for `next_expiry_s`.

    num_source_tokens: source tokens of the waiting groups.
    """

    def __init__(self) -> None:
        self._groups: dict[str, SequenceGroup] = {}  # in order of arrival
        self._expiries: list[tuple[float, int, SequenceGroup]] = []  # a heap; may contain groups that no longer wait
        self._tickets = itertools.count()
        self.num_source_tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def oldest_arrival_s(self) -> float:
        """Arrival of the group that has waited longest. The queue must not be empty."""
        return next(iter(self._groups.values())).request.arrival_s

    @property
    def next_expiry_s(self) -> float:
        """Time before which no group expires. Safe from any thread."""
        expiries = self._expiries
        return expiries[0][0] if expiries else math.inf

    def get(self, request_id: str) -> SequenceGroup | None:
        """Return a group; None if it does not wait."""
        return self._groups.get(request_id)

    def add(self, group: SequenceGroup) -> None:
        """Append a group."""
        self._groups[group.request_id] = group
        self.num_source_tokens += group.request.num_source_tokens
        if group.expires_s < math.inf:
            if len(self._expiries) > 2 * len(self._groups) + 64:  # most of them no longer wait
                self._expiries = [expiry for expiry in self._expiries if self._is_waiting(expiry[2])]
                heapq.heapify(self._expiries)
            heapq.heappush(self._expiries, (group.expires_s, next(self._tickets), group))

    def remove(self, group: SequenceGroup) -> None:
        """Remove a waiting group."""
        del self._groups[group.request_id]
        self.num_source_tokens -= group.request.num_source_tokens

    def take_expired(self, now_s: float) -> list[SequenceGroup]:
        """Remove and return the groups whose deadline or time limit has come, the earliest first."""
        late = []
        while self._expiries and self._expiries[0][0] <= now_s:
            group = heapq.heappop(self._expiries)[2]
            if self._is_waiting(group):
                self.remove(group)
                late.append(group)
        return late

    def _is_waiting(self, group: SequenceGroup) -> bool:
        return self._groups.get(group.request_id) is group


# Bounds of the retry advice: long enough that clients do not retry all the time, short enough that a replica that has
# recovered does not stay idle.
MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0
# The last 1 / RESERVED_SHARE of either bound is reserved for clients that hold less than their fair share of it.
RESERVED_SHARE = 4
# The time left until a deadline must exceed the expected wait and answer by this factor. A request that is taken and
# misses its deadline takes the place of one that would meet it, and a queue at its limit is full of such requests.
DEADLINE_MARGIN = 1.25


class QueueBounds:
    """Refuses requests that exceed a bound of the queue. An empty queue takes every request."""

    def __init__(self, limits: EngineLimits, groups: WaitingGroups, order: ServiceOrder, times: WaitTimes) -> None:
        self._limits = limits
        self._groups = groups
        self._order = order
        self._times = times

    def check_room(self, entry: QueueEntry, now_s: float) -> None:
        """Raise QueueFull, with advice when to retry, if a bound is reached."""
        if not self._groups:
            return
        limits, groups = self._limits, self._groups
        max_wait_s = limits.max_queue_time_s
        wait_s: float | None = None
        if len(groups) >= limits.max_queued_requests:
            message = f"{len(groups)} requests wait already"
        elif groups.num_source_tokens + entry.num_source_tokens > limits.max_queued_tokens:
            message = f"{groups.num_source_tokens} source tokens wait already"
        elif self._exceeds_share(entry):
            message = "more requests of this client wait already than its share of a queue that fills up"
        elif max_wait_s is not None and (wait_s := self._wait_s(entry, now_s) or 0.0) > max_wait_s:
            message = f"it would wait for about {wait_s:.1f} s, longer than the {max_wait_s:g} s allowed"
        else:
            return
        wait_s = wait_s or self._wait_s(entry, now_s)
        if wait_s is None:  # the age of the oldest request is about the time in which the whole queue is replaced
            wait_s = now_s - groups.oldest_arrival_s
        raise QueueFull(message, retry_after_s=min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))

    def check_deadline(self, group: SequenceGroup, entry: QueueEntry, now_s: float) -> None:
        """Raise DeadlineExceeded if the group is expected to miss its deadline."""
        deadline_s = group.request.deadline_s
        if deadline_s is None or not self._groups:
            return
        wait_s = self._wait_s(entry, now_s)
        if wait_s is None:
            return
        answer_s = self._times.pace.seconds(group.expected_target_len)
        if DEADLINE_MARGIN * (wait_s + answer_s) > deadline_s - now_s:
            raise DeadlineExceeded(
                f"it would wait for about {wait_s:.2g} s and take {answer_s:.2g} s, and its deadline comes before"
            )

    def _wait_s(self, entry: QueueEntry, now_s: float) -> float | None:
        return self._times.of_entry_s(entry, now_s)

    def _exceeds_share(self, entry: QueueEntry) -> bool:
        """Return whether only the reserve is left, and the client would hold more than its fair share."""
        limits, num_tokens = self._limits, entry.num_source_tokens
        in_reserve = _is_reserved(len(self._groups) + 1, limits.max_queued_requests)
        tokens_in_reserve = _is_reserved(self._groups.num_source_tokens + num_tokens, limits.max_queued_tokens)
        if not (in_reserve or tokens_in_reserve):
            return False
        totals = self._order.totals_of(entry.client)
        other_clients = self._order.new_clients - {entry.client}
        shares = 1 + max(1, len(other_clients))  # another client may come
        requests = 1 + sum(total.num_requests for total in totals)
        tokens = num_tokens + sum(total.num_source_tokens for total in totals)
        return (in_reserve and requests * shares > limits.max_queued_requests) or (
            tokens_in_reserve and tokens * shares > limits.max_queued_tokens
        )


def _is_reserved(slot: int, num_slots: int) -> bool:
    """Return whether slot number `slot` of `num_slots` belongs to the fairness reserve."""
    return slot > num_slots - num_slots // RESERVED_SHARE


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
            self._check(QueueEntry(client, priority, 1, 1), now_s)

    def put(self, group: SequenceGroup, now_s: float) -> None:
        """Append a group.

        Raises Unavailable once closed, QueueFull at a bound, DeadlineExceeded for a group that is expected to miss its
        deadline. An empty queue also takes a source longer than the token bound; otherwise it could never be served.
        """
        request = group.request
        entry = QueueEntry(request.client, request.priority, request.num_source_tokens, group.cost)
        with self._lock:
            self._check(entry, now_s)
            self._bounds.check_deadline(group, entry, now_s)
            self._order.add(group)
            self._groups.add(group)

    def put_back(self, group: SequenceGroup) -> None:
        """Add a preempted group before all new ones; no bound applies."""
        with self._lock:
            self._groups.add(group)
            self._order.put_back(group)

    def peek(self, max_groups: int) -> list[SequenceGroup]:
        """Return the first groups in order of service, without taking them out."""
        with self._lock:
            return list(itertools.islice(self._order.in_order(), max_groups))

    @contextmanager
    def in_order(self) -> Iterator[OrderOfService]:
        """Iterate over the groups in order of service. Every other method of the queue waits meanwhile."""
        with self._lock:
            yield self._order.in_order()

    def take(self, request_id: str, now_s: float) -> SequenceGroup | None:
        """Take out one group in order to serve it; None if it does not wait here."""
        with self._lock:
            group = self._groups.get(request_id)
            if group is None:
                return None
            self._groups.remove(group)
            cost = group.cost if self._order.take(group) else 0
            self._times.drain.departed(cost, now_s, is_last=not self._groups)
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

    def _check(self, entry: QueueEntry, now_s: float) -> None:
        if self._is_closed:
            raise Unavailable("the server is shutting down and takes no new requests")
        self._bounds.check_room(entry, now_s)

    def _leave_unserved(self, group: SequenceGroup) -> None:
        self._order.remove(group)
        if not self._groups:
            self._times.drain.emptied()
