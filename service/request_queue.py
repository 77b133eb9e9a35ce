"""Sequences that wait: first come, first served, and bounded, so that overload is refused and not hoarded.

Written to by any thread, drained by the engine's. Refuses to know rows, blocks and why a sequence is taken out.
"""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass

from antiphon.service.errors import QueueFull, Unavailable
from antiphon.service.sequence import Sequence

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
    """Bounded FCFS queue of waiting sequences; every method is safe from any thread."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[str, Sequence] = {}  # insertion order is arrival order
        self._num_source_tokens = 0
        self._next_deadline_s = math.inf  # never later than the earliest deadline that waits
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_source_tokens(self) -> int:
        """Source tokens that wait to be encoded."""
        return self._num_source_tokens

    def put(self, sequence: Sequence, now_s: float) -> None:
        """Append a sequence. Raises Unavailable once closed, QueueFull at a bound.

        A source longer than the token bound is still taken by an empty queue: it could never enter otherwise.
        """
        with self._lock:
            if self._is_closed:
                raise Unavailable("the server is shutting down and takes no new requests")
            self._check_room(sequence.source_len, now_s)
            self._waiting[sequence.request_id] = sequence
            self._num_source_tokens += sequence.source_len
            if sequence.request.deadline_s is not None:
                self._next_deadline_s = min(self._next_deadline_s, sequence.request.deadline_s)

    def peek(self, max_sequences: int) -> list[Sequence]:
        """The oldest waiting sequences, oldest first, left where they are."""
        with self._lock:
            return list(itertools.islice(self._waiting.values(), max_sequences))

    def remove(self, request_id: str) -> Sequence | None:
        """Take one sequence out; None when it does not wait here."""
        with self._lock:
            return self._remove(request_id)

    def expired(self, now_s: float) -> list[Sequence]:
        """Take out every sequence whose deadline has come, oldest first."""
        if now_s < self._next_deadline_s:  # spares the scan; a stale bound only costs one
            return []
        with self._lock:
            late = [s for s in self._waiting.values() if _deadline_s(s) <= now_s]
            for sequence in late:
                self._remove(sequence.request_id)
            self._next_deadline_s = min(map(_deadline_s, self._waiting.values()), default=math.inf)
            return late

    def close(self) -> None:
        """Refuse every later put; what waits stays."""
        with self._lock:
            self._is_closed = True

    def _remove(self, request_id: str) -> Sequence | None:
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None:
            self._num_source_tokens -= sequence.source_len
        return sequence

    def _check_room(self, source_len: int, now_s: float) -> None:
        if not self._waiting:
            return
        if len(self._waiting) >= self._limits.max_requests:
            message = f"{len(self._waiting)} requests wait already"
        elif self._num_source_tokens + source_len > self._limits.max_source_tokens:
            message = f"{self._num_source_tokens} source tokens wait already"
        else:
            return
        # What the oldest has waited is about what the queue takes to turn over.
        oldest = next(iter(self._waiting.values()))
        waited_s = now_s - oldest.request.arrival_s
        raise QueueFull(message, retry_after_s=min(max(waited_s, MIN_RETRY_S), MAX_RETRY_S))


def _deadline_s(sequence: Sequence) -> float:
    return math.inf if sequence.request.deadline_s is None else sequence.request.deadline_s
