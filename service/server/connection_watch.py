"""Notices that the gRPC port has as many connections as it may: gRPC closes further ones at once, and says nothing.

Connections are counted as open files beyond those that the process has for itself; gRPC does not tell their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.service.server.machine import OWN_FILES

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
# The log says so again after this long, for as long as it goes on.
_WARN_INTERVAL_S = 60.0
_OPEN_FILES = Path("/proc/self/fd")


class ConnectionWatch:
    """Compares the open files with the limit of connections, for the event loop.

    most: connections that the port takes; None: no limit, and nothing to notice.
    """

    def __init__(
        self,
        most: int | None,
        count_files: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._count_files = count_files
        self._clock = clock
        self._num_own = min(self._count_files(), OWN_FILES)  # connections that are there already are not our own
        self._warned_s: float | None = None
        self.is_full = False
        """True when new connections are closed, as of the last look."""

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def look(self) -> None:
        """Compare once; warn where the limit is reached, but not every time."""
        if self._most is None:
            return
        num_connections = self._count_files() - self._num_own
        self.is_full = num_connections >= self._most
        now_s = self._clock()
        if self.is_full and (self._warned_s is None or now_s - self._warned_s >= _WARN_INTERVAL_S):
            self._warned_s = now_s
            log.warning(
                "%d connections are open, as many as max_connections and the limit of open files allow; "
                "further ones are closed: raise the limit (ulimit -n), or end idle ones (max_connection_idle_s)",
                self._most,
            )


def num_open_files() -> int:
    """Return how many files this process has open; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        # Linux tells from 6.2 on; before that its size is 0, and the entries are counted.
        return _OPEN_FILES.stat().st_size or sum(1 for _ in _OPEN_FILES.iterdir())
    return 0
