"""Hands things from the event loop to a thread that does something slow with them, many at a time; never waits for it.

Knows nothing of what it carries. What the thread cannot keep up with is dropped, and whoever asked is told.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Outlet(Generic[_T]):
    """A bounded queue and the thread that empties it. take: gets the oldest, at most max_batch of them.

    gather_s: how long the first of a batch waits for others: one waking for all. on_drop: told of each that is dropped.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[list[_T]], None],
        *,
        on_drop: Callable[[], None],
        gather_s: float,
        max_waiting: int = 4096,
        max_batch: int = 256,
    ) -> None:
        self._take = take
        self._on_drop = on_drop
        self._gather_s = gather_s
        self._max_waiting = max_waiting
        self._max_batch = max_batch
        self._waiting: deque[_T] = deque()
        self._has_some = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _T) -> None:
        """Hand something over; at once."""
        if len(self._waiting) >= self._max_waiting:
            self._on_drop()
            return
        self._waiting.append(item)
        if not self._has_some.is_set():
            self._has_some.set()

    def close(self, timeout_s: float) -> bool:
        """Let the thread take what waits, for at most so long, and end; whether it did. Blocks."""
        self._is_closing.set()
        self._has_some.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing.is_set() or self._waiting:
            self._has_some.wait()
            self._is_closing.wait(self._gather_s)
            self._has_some.clear()  # before looking: what comes from now on sets it again
            while self._waiting:
                self._hand_on([self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))])
            if self._is_closing.is_set():
                self._has_some.set()

    def _hand_on(self, batch: list[_T]) -> None:
        try:
            self._take(batch)
        except Exception:  # whatever it was, what comes later is still to be taken
            log.exception("%d things could not be passed on", len(batch))
