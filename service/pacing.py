"""How many streams there are, and so how many tokens each message brings. Shared by every model of a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Pacing:
    """Keeps the messages of all streams together below a rate. For the event loop."""

    def __init__(self, max_messages_per_s: float) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._num_streams = 0

    @property
    def window_s(self) -> float:
        """How long one more stream gathers tokens for a message.

        A message costs CPU that the models need: alone, a stream gets every token by itself; in a crowd, several.
        """
        return (self._num_streams + 1) / self._max_messages_per_s

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream as long as the context lasts."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
