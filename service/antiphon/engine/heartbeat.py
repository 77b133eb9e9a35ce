"""Time for which work has waited for a thread, for a watchdog. One thread writes, any thread reads."""

from __future__ import annotations

from collections.abc import Callable


class Heartbeat:
    """Distinguishes a thread that works or has nothing to do from a thread that hangs.

    clock: monotonic, in seconds. No method needs a lock, because its assignments are correct in any order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since_s: float | None = None

    def beat(self) -> None:
        """Record that the thread begins a piece of work."""
        self._busy_since_s = self._clock()

    def rest(self) -> None:
        """Record that the thread has nothing to do."""
        self._busy_since_s = None

    def wake(self) -> None:
        """Record new work. The caller adds the work, and holds the lock under which the thread calls `rest`."""
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()

    @property
    def busy_s(self) -> float:
        """Seconds since the current piece of work began, or since new work began to wait; 0 at rest."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)
