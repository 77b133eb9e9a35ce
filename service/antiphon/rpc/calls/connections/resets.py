"""Closes connections that reset their calls as fast as they begin them. Resets cost a server far more than its client.

The rule is Envoy's (`premature_reset_total_stream_count`): a connection is closed if it has made at least 500 calls and
its client ended more than half of them before their request was read. Counts are cleared every ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from antiphon.rpc.calls.background import ignore_result, in_background
from antiphon.rpc.calls.connections.disconnect import disconnect

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
