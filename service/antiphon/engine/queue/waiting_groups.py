"""The groups of the queue by id, their source tokens, and the times at which they expire."""

from __future__ import annotations

import heapq
import itertools
import math

from antiphon.engine.sequences.sequence import SequenceGroup


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
                self._expiries = [one for one in self._expiries if self._is_waiting(one[2])]
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
