"""Gives free memory back to the system after a burst of calls.

glibc keeps what was freed in an arena for each thread, and gRPC's threads have arenas of their own: 160,000 calls that
were reset at once left 80 MB behind that nothing used. Where there is no glibc, nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# How often to look, and the growth since the last time that makes it worth the work, which takes up to 40 ms on a
# thread of its own.
_INTERVAL_S = 2.0
_MIN_GROWTH_BYTES = 8 << 20

_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


class FreeMemory:
    """Looks how much memory is resident, and trims what has grown. resident_bytes: of this process; 0 is unknown."""

    def __init__(self, resident_bytes: Callable[[], int]) -> None:
        self._resident_bytes = resident_bytes
        self._last_bytes = 0
        self._thread = ThreadPoolExecutor(1, "free-memory")

    async def run(self) -> None:
        """Look now, which gives back what loading has left, and again and again until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Trim where memory has grown since the last time."""
        if _trim is None or self._resident_bytes() < self._last_bytes + _MIN_GROWTH_BYTES:
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, _trim, 0)
        self._last_bytes = self._resident_bytes()
