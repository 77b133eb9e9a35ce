"""Progress bar on a terminal. Draws nothing if the output is not a terminal."""

from __future__ import annotations

import os
import shutil
import stat
import time
from typing import TextIO

# People cannot read faster updates.
_INTERVAL_S = 0.1


class Progress:
    """Counts processed lines and bytes, and draws them on `stream` if it is a terminal.

    total_bytes: size of the input; None if it is unknown, and then only a count is drawn.
    """

    def __init__(self, stream: TextIO, *, total_bytes: int | None) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._total_bytes = total_bytes
        self._start_s = time.monotonic()
        self._drawn_s = 0.0
        self._is_drawn = False
        self._num_lines = 0
        self._num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        """Count one more line of num_bytes bytes."""
        self._num_lines += 1
        self._num_bytes += num_bytes
        now_s = time.monotonic()
        if self._is_shown and now_s - self._drawn_s >= _INTERVAL_S:
            self._drawn_s = now_s
            self._draw(now_s)

    def clear(self) -> None:
        """Clear the terminal's line for another message."""
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def finish(self) -> None:
        """Draw the last state and end the line."""
        if self._is_shown and self._num_lines:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now_s: float) -> None:
        rate = self._num_lines / max(now_s - self._start_s, 1e-9)
        text = f"{self._num_lines} lines, {rate:.0f}/s"
        if self._total_bytes:
            done = min(1.0, self._num_bytes / self._total_bytes)
            width = max(10, shutil.get_terminal_size().columns - len(text) - 10)
            bar = "#" * round(width * done)
            text = f"{done:4.0%} [{bar:<{width}}] {text}"
        self._is_drawn = True
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


def remaining_bytes(descriptor: int) -> int | None:
    """Return the unread bytes of a regular file; None for a pipe or a terminal."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
