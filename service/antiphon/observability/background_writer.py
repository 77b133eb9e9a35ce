"""Queue from the event loop to a thread that writes items in batches. The event loop never waits for the thread.

An item that arrives while the queue is full is dropped, and a callback counts it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class BackgroundWriter(Generic[_T]):
    """Bounded queue and the thread that empties it.

    write: called in the thread with the oldest items, at most max_batch of them. on_drop: called for each dropped item.
    gather_s: time that the first item of a batch waits for others, so that the thread wakes once for all of them.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[list[_T]], None],
        *,
        on_drop: Callable[[], None],
        gather_s: float,
        max_waiting: int = 4096,
        max_batch: int = 256,
    ) -> None:
        self._write = write
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
        """Add an item to the queue, or drop it if the queue is full. Does not block."""
        if len(self._waiting) >= self._max_waiting:
            self._on_drop()
            return
        self._waiting.append(item)
        if not self._has_some.is_set():
            self._has_some.set()

    def close(self, timeout_s: float) -> bool:
        """Write the queued items for at most timeout_s seconds, then end. Return True if the thread ended. Blocks."""
        self._is_closing.set()
        self._has_some.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing.is_set() or self._waiting:
            self._has_some.wait()
            self._is_closing.wait(self._gather_s)
            self._has_some.clear()  # before the queue is read: an item that comes later sets the event again
            while self._waiting:
                self._write_batch([self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))])
            if self._is_closing.is_set():
                self._has_some.set()

    def _write_batch(self, batch: list[_T]) -> None:
        try:
            self._write(batch)
        except Exception:  # later batches must still be written
            log.exception("%d items could not be written", len(batch))
