"""Requests that are to be given up, and why: the only thing that travels backwards.

Written to by any thread, read by the engine's. Knows no request but by its id.
"""

from __future__ import annotations

import enum
from collections import deque


class CancelCause(enum.Enum):
    """Why a request is given up before its answer was read; a label of metrics."""

    CLIENT = "client"  # hung up, cancelled the call, or its connection was lost
    SLOW_READER = "slow_reader"  # takes no message for longer than the server waits
    DEADLINE = "deadline"  # gRPC saw the deadline pass before the engine did; counted as a deadline miss
    LOST_LOOP = "lost_loop"  # whoever asked ran in an event loop that is closed
    FAULT = "fault"  # the server failed to pass the answer on


class Cancellations:
    """What was cancelled since the engine last looked; thread-safe."""

    def __init__(self) -> None:
        self._asked: deque[tuple[str, CancelCause]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def put(self, request_id: str, cause: CancelCause) -> None:
        """Ask that a request be ended; an unknown or finished one will be ignored."""
        self._asked.append((request_id, cause))

    def take(self) -> list[tuple[str, CancelCause]]:
        """What was asked, oldest first; it is forgotten."""
        # popleft, not a swap: put may append meanwhile.
        return [self._asked.popleft() for _ in range(len(self._asked))]
