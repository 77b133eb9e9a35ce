"""Watches the number of connections to the gRPC port: beyond the limit, gRPC closes new ones without a log line.

gRPC does not report their number. It is estimated as the number of open files minus the process's own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.server.models.machine import OWN_FILES

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
# Interval of the warning while the limit is reached.
_WARN_INTERVAL_S = 60.0
_OPEN_FILES = Path("/proc/self/fd")


class ConnectionWatch:
    """Compares the open files with the limit of connections. For the event loop.

    most: limit of connections to the port; None is no limit.
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
        self._num_own = min(self._count_files(), OWN_FILES)  # the rest are connections that exist already
        self._warned_s: float | None = None
        self.is_full = False
        """True when new connections were closed at the last check."""

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_INTERVAL_S)

    def look(self) -> None:
        """Check once. Warn if the limit is reached, at most once per minute."""
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
    """Return the number of open files of this process; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        # From Linux 6.2 on the directory's size is the number. Before that it is 0, and the entries are counted.
        return _OPEN_FILES.stat().st_size or sum(1 for _ in _OPEN_FILES.iterdir())
    return 0
