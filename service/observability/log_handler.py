"""Writes log records from a thread of its own, so that nobody who serves waits for whoever reads the log.

Standard error is a pipe as a rule: while its reader is slow, or a disk behind it full, a write waits, and the event
loop with it, which answers every client and every probe.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import TextIO

# Lines that wait for a slow reader: some megabytes, and several seconds of the densest log.
MAX_PENDING_LINES = 10_000
# How long the last lines may take when the process ends.
_LAST_LINES_S = 1.0


class BackgroundHandler(logging.Handler):
    """Formats a record where it is made, and writes it to a stream in the background, in order.

    Beyond MAX_PENDING_LINES records are dropped; how many is told once the stream takes lines again.

    on_drop: called for each of them, from whichever thread made it.
    """

    def __init__(self, stream: TextIO, max_pending: int = MAX_PENDING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._pending: queue.Queue[str | threading.Event] = queue.Queue(max_pending)
        self._num_dropped = 0
        self._is_writing = False
        self.on_drop: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """Whether a line is still to be written: its stream may take no more, and is not to be waited for."""
        return self._is_writing or not self._pending.empty()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; never waits."""
        try:
            self._pending.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._num_dropped += 1
            self.on_drop()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for what is queued to be written, but not for long."""
        is_written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._pending.put(is_written, timeout=_LAST_LINES_S)
            is_written.wait(_LAST_LINES_S)

    def _run(self) -> None:
        while True:
            item = self._pending.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._is_writing = True
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more: there is no one to tell
                self._write(item)
            self._is_writing = False

    def _write(self, line: str) -> None:
        dropped, self._num_dropped = self._num_dropped, 0
        self._stream.write(line)
        if dropped:
            self._stream.write(f"{dropped} log records are missing here: the log was not read in time\n")
        self._stream.flush()


def is_log_behind() -> bool:
    """Whether a handler of the process's log still has lines, though they were waited for."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, BackgroundHandler)]
    for handler in handlers:
        handler.flush()
    return any(handler.is_behind for handler in handlers)
