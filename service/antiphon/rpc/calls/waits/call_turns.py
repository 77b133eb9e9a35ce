"""Fair order in which calls of different callers start on the event loop.

Without it, a burst of thousands of calls from one client would run before a single call that another client sends a
moment later. Each iteration of the loop starts a few calls. When more calls wait, their callers take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque

# Calls that start in one iteration of the event loop, each with 0.1 to 1 ms of work.
_CALLS_PER_TURN = 8


class CallTurns:
    """Calls that wait to start, grouped by caller. For one event loop."""

    def __init__(self, calls_per_turn: int = _CALLS_PER_TURN) -> None:
        self._calls_per_turn = self._num_left = calls_per_turn
        self._is_scheduled = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the caller whose turn is next comes first

    @property
    def num_waiting(self) -> int:
        """Number of calls that have not started."""
        return sum(map(len, self._waiting.values()))

    async def take(self, caller: str) -> None:
        """Wait until a call may start. Returns immediately unless many other calls have just started."""
        if not self._is_scheduled:
            self._schedule()
        if self._num_left > 0 and not self._waiting:
            self._num_left -= 1
            return
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(start)
        await start

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._num_left = self._calls_per_turn
        while self._waiting and self._num_left > 0:
            if self._start_next():
                self._num_left -= 1
        if self._waiting:
            self._schedule()

    def _start_next(self) -> bool:
        """Start the oldest call of the next caller. Return False if that call has ended already."""
        caller, starts = next(iter(self._waiting.items()))
        start = starts.popleft()
        del self._waiting[caller]
        if starts:
            self._waiting[caller] = starts  # behind the others
        if start.done():
            return False
        start.set_result(None)
        return True
