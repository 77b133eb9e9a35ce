"""Bounds of the queue: requests, source tokens, expected wait, and the share of one client in a nearly full queue."""

from __future__ import annotations

from antiphon.domain.errors import DeadlineExceeded, QueueFull
from antiphon.domain.limits import EngineLimits
from antiphon.engine.queue.service_order import Newcomer, ServiceOrder
from antiphon.engine.queue.wait_times import WaitTimes
from antiphon.engine.queue.waiting_groups import WaitingGroups
from antiphon.engine.sequences.sequence import SequenceGroup

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

    def check_room(self, newcomer: Newcomer, now_s: float) -> None:
        """Raise QueueFull, with advice when to retry, if a bound is reached."""
        if not self._groups:
            return
        limits, held = self._limits, self._groups
        max_wait_s = limits.max_queue_time_s
        wait_s: float | None = None
        if len(held) >= limits.max_queued_requests:
            message = f"{len(held)} requests wait already"
        elif held.num_source_tokens + newcomer.num_source_tokens > limits.max_queued_tokens:
            message = f"{held.num_source_tokens} source tokens wait already"
        elif self._exceeds_share(newcomer):
            message = "more requests of this client wait already than its share of a queue that fills up"
        elif max_wait_s is not None and (wait_s := self._wait_s(newcomer, now_s) or 0.0) > max_wait_s:
            message = f"it would wait for about {wait_s:.1f} s, longer than the {max_wait_s:g} s allowed"
        else:
            return
        wait_s = wait_s or self._wait_s(newcomer, now_s)
        if wait_s is None:  # the age of the oldest request is about the time in which the whole queue is replaced
            wait_s = now_s - held.oldest_arrival_s
        raise QueueFull(message, retry_after_s=min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))

    def check_deadline(self, group: SequenceGroup, newcomer: Newcomer, now_s: float) -> None:
        """Raise DeadlineExceeded if the group is expected to miss its deadline."""
        deadline_s = group.request.deadline_s
        if deadline_s is None or not self._groups:
            return
        wait_s = self._wait_s(newcomer, now_s)
        if wait_s is None:
            return
        answer_s = self._times.pace.seconds(group.expected_target_len)
        if DEADLINE_MARGIN * (wait_s + answer_s) > deadline_s - now_s:
            raise DeadlineExceeded(
                f"it would wait for about {wait_s:.2g} s and take {answer_s:.2g} s, and its deadline comes before"
            )

    def _wait_s(self, newcomer: Newcomer, now_s: float) -> float | None:
        return self._times.of_newcomer_s(newcomer, now_s)

    def _exceeds_share(self, newcomer: Newcomer) -> bool:
        """Return whether only the reserve is left, and the client would hold more than its fair share."""
        limits, num_tokens = self._limits, newcomer.num_source_tokens
        in_reserve = _is_reserved(len(self._groups) + 1, limits.max_queued_requests)
        tokens_in_reserve = _is_reserved(self._groups.num_source_tokens + num_tokens, limits.max_queued_tokens)
        if not (in_reserve or tokens_in_reserve):
            return False
        totals = self._order.totals_of(newcomer.client)
        others = self._order.new_clients - {newcomer.client}
        shares = 1 + max(1, len(others))  # another client may come
        requests = 1 + sum(one.num_requests for one in totals)
        tokens = num_tokens + sum(one.num_source_tokens for one in totals)
        return (in_reserve and requests * shares > limits.max_queued_requests) or (
            tokens_in_reserve and tokens * shares > limits.max_queued_tokens
        )


def _is_reserved(taken: int, most: int) -> bool:
    """Return whether slot number `taken` of `most` belongs to the fairness reserve."""
    return taken > most - most // RESERVED_SHARE
