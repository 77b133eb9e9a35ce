"""Bounds the connections of the metrics port: how many there may be at once, and how long each may last.

Knows sockets and nothing of what is sent over them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

# How long a connection that was ended may take to go before a new one is refused for its sake.
_LEAVE_S = 1.0


class Scrapes:
    """Open connections with their ages. Thread-safe.

    A new one beyond the limit ends the oldest: a scrape takes milliseconds, so the oldest is one that says nothing.

    most: connections at once. longest_s: how long one may last, however often it sends a byte.
    """

    def __init__(self, most: int, longest_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._longest_s = longest_s
        self._clock = clock
        self._since_s: dict[socket.socket, float] = {}  # oldest first
        self._changed = threading.Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Take a connection in, and end the oldest where there are too many; False where that does not go."""
        with self._changed:
            if len(self._since_s) >= self._most:
                _end(next(iter(self._since_s)))
                self._changed.wait_for(lambda: len(self._since_s) < self._most, _LEAVE_S)
            if len(self._since_s) >= self._most:
                return False
            self._since_s[connection] = self._clock()
            return True

    def leave(self, connection: socket.socket) -> None:
        """Forget a connection that is about to be closed; one that was never admitted too."""
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
    """End both directions, so that a thread that reads or writes there gets an error and closes it.

    As a plain socket even where it is encrypted: TLS would take its state from under that thread.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
