"""Limits the connections of the metrics port: their number and the duration of each.

Knows sockets, not the data sent over them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

# Time for an ended connection to close before a new one is refused.
_LEAVE_S = 1.0


class Scrapes:
    """Open connections with their ages. Thread-safe.

    A new connection beyond the limit ends the oldest one: a scrape takes milliseconds, so the oldest must be idle.

    most: maximum number of connections at once. longest_s: longest duration of a connection, even an active one.
    """

    def __init__(self, most: int, longest_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._longest_s = longest_s
        self._clock = clock
        self._since_s: dict[socket.socket, float] = {}  # oldest first
        self._changed = threading.Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Add a connection, and end the oldest one if there are too many. Return False if that one does not end."""
        with self._changed:
            if len(self._since_s) >= self._most:
                _end(next(iter(self._since_s)))
                self._changed.wait_for(lambda: len(self._since_s) < self._most, _LEAVE_S)
            if len(self._since_s) >= self._most:
                return False
            self._since_s[connection] = self._clock()
            return True

    def leave(self, connection: socket.socket) -> None:
        """Remove a connection that is about to be closed. It need not have been admitted."""
        with self._changed:
            self._since_s.pop(connection, None)
            self._changed.notify()

    def end_overdue(self) -> None:
        """End connections that have lasted too long."""
        with self._changed:
            latest_s = self._clock() - self._longest_s
            for connection in [one for one, since_s in self._since_s.items() if since_s <= latest_s]:
                _end(connection)


def _end(connection: socket.socket) -> None:
    """Shut down both directions, so that a thread that reads or writes gets an error and closes the connection.

    Uses the plain socket's method even for TLS: that of the TLS socket would remove its state while the thread uses it.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
