"""Closes connections that reset their calls as fast as they begin them. Resets cost a server far more than its client.

The rule is Envoy's (`premature_reset_total_stream_count`): a connection is closed if it has made at least 500 calls and
its client ended more than half of them before their request was read. Counts are cleared every ten seconds.
Cause: gRPC's core has no such rule, and its Python server has no method that closes a connection: `disconnect` finds
the socket among the files of the process. Upstream: no issue is known. Cost: two counts a call; a look at the open
files for each closed connection.
Remove this module once gRPC closes such connections itself: then tests/unit/calls/test_resets.py passes without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from antiphon.rpc.background import ignore_result, in_background

_OWN_FILES = Path("/proc/self/fd")
# gRPC uses IPv6 sockets for IPv4 clients too, but reports such peers by their IPv4 address.
_MAPPED = "::ffff:"


def disconnect(peer: str) -> bool:
    """Close the connection to `peer`, an address as `ServicerContext.peer` returns it. Blocks.

    Returns False if there is no such connection, or if the system does not list open files. A descriptor is duplicated
    before it is inspected: its number may belong to another connection a moment later, the duplicate's cannot.
    """
    address = _address_of(peer)
    if address is None or not _OWN_FILES.is_dir():
        return False
    return any(_shut_down(entry, address) for entry in _OWN_FILES.iterdir())


def _address_of(peer: str) -> tuple[str, int] | None:
    """Return host and port of `ipv4:127.0.0.1:4242` or `ipv6:%5B::1%5D:4242`; None for other kinds of address."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def _shut_down(entry: Path, address: tuple[str, int]) -> bool:
    """Close the connection of an open file if its other end has the address. Return whether it was."""
    with contextlib.suppress(OSError):
        if not str(entry.readlink()).startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(int(entry.name))) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                host, port = duplicate.getpeername()[:2]
                if (host.removeprefix(_MAPPED), port) == address:
                    duplicate.shutdown(socket.SHUT_RDWR)
                    return True
    return False


log = logging.getLogger(__name__)

_MIN_CALLS = 500
_WINDOW_S = 10.0


class Resets:
    """Counts the calls of each connection. For the event loop.

    on_close: called after each connection that was closed, in another thread. close: closes one by its address.
    """

    def __init__(
        self,
        on_close: Callable[[], None],
        close: Callable[[str], bool] = disconnect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_close = on_close
        self._close = close
        self._clock = clock
        self._window_ends_s = clock() + _WINDOW_S
        self._calls: Counter[str] = Counter()
        self._resets: Counter[str] = Counter()

    def ended(self, connection: str, *, is_reset: bool) -> None:
        """Record the end of a call. is_reset: its client ended it before its request was read."""
        if self._clock() >= self._window_ends_s:
            self._window_ends_s = self._clock() + _WINDOW_S
            self._calls.clear()
            self._resets.clear()
        self._calls[connection] += 1
        if not is_reset:
            return
        self._resets[connection] += 1
        if 2 * self._resets[connection] > self._calls[connection] >= _MIN_CALLS:
            del self._calls[connection], self._resets[connection]
            ignore_result(in_background(lambda: self._cut(connection), "disconnect"))

    def _cut(self, connection: str) -> None:
        if self._close(connection):  # False for a closed connection, whose remaining calls still end one by one
            self._on_close()
            log.warning("closed the connection of %s: it reset more than half of its calls", connection)
