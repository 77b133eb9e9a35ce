"""Connections that reset their calls as fast as they begin them, which costs a server far more than its client.

The rule is Envoy's (`premature_reset_total_stream_count`): of at least 500 calls, more than half were ended by their
client before their request was read. Such a connection is closed. Counts are forgotten every ten seconds.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from antiphon.service.rpc.calls.background import in_background, let_go
from antiphon.service.rpc.calls.disconnect import disconnect

log = logging.getLogger(__name__)

_MIN_CALLS = 500
_WINDOW_S = 10.0


class Resets:
    """Counts the calls of each connection. For the event loop.

    on_close: hears of every connection that was closed, in another thread. close: closes one, by its address.
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
        """Note the end of a call. is_reset: its client ended it before its request was read."""
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
            let_go(in_background(lambda: self._cut(connection), "disconnect"))

    def _cut(self, connection: str) -> None:
        if self._close(connection):  # not where it is closed already: what it had sent still ends call by call
            self._on_close()
            log.warning("closed the connection of %s, which resets its calls", connection)
