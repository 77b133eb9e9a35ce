"""Cancelled requests and their causes: the only data that travels backwards.

Any thread writes, the engine's thread reads. Knows requests by their ids only.
"""

from __future__ import annotations

import enum
from collections import deque


class CancelCause(enum.Enum):
    """Cause of the cancellation of a request before its answer was read; a label of metrics."""

    CLIENT = "client"  # the client cancelled the call, or its connection was lost
    SLOW_READER = "slow_reader"  # the client reads no message for longer than the server waits
    DEADLINE = "deadline"  # gRPC saw the deadline pass before the engine did; counted as a deadline miss
    LOST_LOOP = "lost_loop"  # the event loop of the reader is closed
    FAULT = "fault"  # the server failed to send the answer


class Cancellations:
    """Cancellations since the engine last read them; thread-safe."""

    def __init__(self) -> None:
        self._asked: deque[tuple[str, CancelCause]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def put(self, request_id: str, cause: CancelCause) -> None:
        """Add a request to be ended; the engine ignores unknown and finished ones."""
        self._asked.append((request_id, cause))

    def take(self) -> list[tuple[str, CancelCause]]:
        """Remove and return all cancellations, oldest first."""
        # popleft, not a swap: another thread may call put meanwhile.
        return [self._asked.popleft() for _ in range(len(self._asked))]
