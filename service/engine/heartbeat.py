"""For how long work waits for a thread: what a watchdog reads. One thread beats, any thread asks."""

from __future__ import annotations

from collections.abc import Callable


class Heartbeat:
    """Tells a thread that works, or has nothing to do, from one that should work and does not.

    clock: seconds, monotonic. Each method is one assignment or two that any order suits: no lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since_s: float | None = None

    def beat(self) -> None:
        """Begin a piece of work."""
        self._busy_since_s = self._clock()

    def rest(self) -> None:
        """Have nothing to do."""
        self._busy_since_s = None

    def wake(self) -> None:
        """Have something to do again; said by whoever brings it, under the lock that the thread rests with."""
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()

    @property
    def busy_s(self) -> float:
        """Seconds since the piece of work under way began, or since there is one that has not; 0 at rest."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)
