"""Returns free memory to the system after a burst of calls.

glibc keeps freed memory in one arena per thread, and gRPC's threads have separate arenas: 160,000 calls that were reset
at once left 80 MB of unused memory. There is nothing to trim on systems without glibc. The caches of idle models are
freed too: with all rows in use the shipped model's takes 64 MB.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

# Time between trims: the minimum while a trim frees memory, doubled up to the maximum while it does not. Calls may hold
# memory long after it stopped growing. A trim takes up to 40 ms in a separate thread.
_MIN_INTERVAL_S = 2.0
_MAX_INTERVAL_S = 64.0
# Growth that triggers a trim at once, and the freed bytes after which the next trim follows soon.
_MIN_GROWTH_BYTES = 8 << 20
_MIN_GAIN_BYTES = 1 << 20
# Looks between two at the caches: a model that had no request for 10 to 20 s is idle.
_LOOKS_PER_CACHE = 5

_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Engine(Protocol):
    """Engine of a model."""

    def free_idle_cache(self) -> None:
        """Return the cache's memory to the system if no request came since the last call."""


class FreeMemory:
    """Trims the heap after it has grown, and again until nothing is freed. resident_bytes: memory of this process."""

    def __init__(
        self,
        resident_bytes: Callable[[], int],
        trim: Callable[[int], object] | None = _trim,
        engines: Callable[[], Iterable[Engine]] = tuple,
    ) -> None:
        """trim: malloc_trim of glibc; None if there is none. engines: returns those whose caches may be freed."""
        self._resident_bytes = resident_bytes
        self._engines = engines
        self._num_looks = 0
        self._trim = trim
        self._last_bytes = 0
        self._interval_s = _MIN_INTERVAL_S
        self._num_waited = 0
        self._thread = ThreadPoolExecutor(1, "free-memory")

    async def run(self) -> None:
        """Check now, which frees memory that loading has left, and then periodically until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_MIN_INTERVAL_S)

    async def look(self) -> None:
        """Trim if memory has grown or the interval has passed. Called every _MIN_INTERVAL_S."""
        self._num_looks += 1
        if self._num_looks % _LOOKS_PER_CACHE == 0:
            for engine in self._engines():
                await asyncio.get_running_loop().run_in_executor(self._thread, engine.free_idle_cache)
        self._num_waited += 1
        before = self._resident_bytes()
        has_grown = before >= self._last_bytes + _MIN_GROWTH_BYTES
        if self._trim is None or not (has_grown or self._num_waited * _MIN_INTERVAL_S >= self._interval_s):
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._trim, 0)
        self._num_waited, self._last_bytes = 0, self._resident_bytes()
        is_worth_it = has_grown or before - self._last_bytes >= _MIN_GAIN_BYTES
        self._interval_s = _MIN_INTERVAL_S if is_worth_it else min(2 * self._interval_s, _MAX_INTERVAL_S)
