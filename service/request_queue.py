"""Requests that wait: first come, first served, and bounded, so that overload is refused and not hoarded.

Written to by any thread, drained by the engine's. Refuses to know rows, blocks and why a request is taken out.
"""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass

from antiphon.service.errors import QueueFull, Unavailable
from antiphon.service.sequence import SequenceGroup

# Bounds of the retry advice: long enough not to hammer, short enough not to idle a replica that has recovered.
MIN_RETRY_S = 0.05
MAX_RETRY_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Most requests that wait, and most source tokens they hold together."""

    max_requests: int
    max_source_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_source_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


class RequestQueue:
    """Bounded FCFS queue of waiting groups; every method is safe from any thread."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[str, SequenceGroup] = {}  # insertion order is arrival order
        self._num_source_tokens = 0
        self._next_expiry_s = math.inf  # never later than the earliest that waits
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_source_tokens(self) -> int:
        """Source tokens that wait to be encoded."""
        return self._num_source_tokens

    def put(self, group: SequenceGroup, now_s: float) -> None:
        """Append a group. Raises Unavailable once closed, QueueFull at a bound.

        A source longer than the token bound is still taken by an empty queue: it could never enter otherwise.
        """
        with self._lock:
            if self._is_closed:
                raise Unavailable("the server is shutting down and takes no new requests")
            self._check_room(group.request.num_source_tokens, now_s)
            self._waiting[group.request_id] = group
            self._num_source_tokens += group.request.num_source_tokens
            self._next_expiry_s = min(self._next_expiry_s, group.expires_s)

    def peek(self, max_groups: int) -> list[SequenceGroup]:
        """The oldest waiting groups, oldest first, left where they are."""
        with self._lock:
            return list(itertools.islice(self._waiting.values(), max_groups))

    def remove(self, request_id: str) -> SequenceGroup | None:
        """Take one group out; None when it does not wait here."""
        with self._lock:
            return self._remove(request_id)

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Take out every group whose deadline or time limit has come, oldest first."""
        if now_s < self._next_expiry_s:  # spares the scan; a stale bound only costs one
            return []
        with self._lock:
            late = [group for group in self._waiting.values() if group.expires_s <= now_s]
            for group in late:
                self._remove(group.request_id)
            self._next_expiry_s = min((group.expires_s for group in self._waiting.values()), default=math.inf)
            return late

    def close(self) -> None:
        """Refuse every later put; what waits stays."""
        with self._lock:
            self._is_closed = True

    def _remove(self, request_id: str) -> SequenceGroup | None:
        group = self._waiting.pop(request_id, None)
        if group is not None:
            self._num_source_tokens -= group.request.num_source_tokens
        return group

    def _check_room(self, num_source_tokens: int, now_s: float) -> None:
        if not self._waiting:
            return
        if len(self._waiting) >= self._limits.max_requests:
            message = f"{len(self._waiting)} requests wait already"
        elif self._num_source_tokens + num_source_tokens > self._limits.max_source_tokens:
            message = f"{self._num_source_tokens} source tokens wait already"
        else:
            return
        # What the oldest has waited is about what the queue takes to turn over.
        oldest = next(iter(self._waiting.values()))
        waited_s = now_s - oldest.request.arrival_s
        raise QueueFull(message, retry_after_s=min(max(waited_s, MIN_RETRY_S), MAX_RETRY_S))
