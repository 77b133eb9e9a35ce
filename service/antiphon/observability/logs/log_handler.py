"""Writes log records in a separate thread, so that serving never waits for the reader of the log.

Standard error is usually a pipe. If its reader is slow or the disk behind it is full, a write blocks. In the event loop
that would block every client and every probe. Every line that is not written is counted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

# Maximum number of lines that wait for a slow reader: some megabytes, several seconds of the busiest log.
MAX_PENDING_LINES = 10_000
# Time for the last lines when the process ends.
_LAST_LINES_S = 1.0
# Delay before a stream that failed is tried again, if there is no further line.
_RETRY_S = 5.0


class BackgroundHandler(logging.Handler):
    """Formats a record in the caller's thread, and writes it to a stream in the background, in order.

    Drops a line if MAX_PENDING_LINES wait already, or if the stream fails: a full disk, or a pipe without a reader.
    When the stream accepts lines again, a line in the log gives the number of missing lines.
    """

    def __init__(self, stream: TextIO, max_pending: int = MAX_PENDING_LINES, retry_s: float = _RETRY_S) -> None:
        super().__init__()
        self._lines = _Lines(stream)
        self._pending: queue.Queue[str | threading.Event] = queue.Queue(max_pending)
        self._retry_s = retry_s
        self._drops = _Drops()
        self._num_late = 0
        self._num_refused = 0
        self._refusal = ""
        self._is_writing = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def is_behind(self) -> bool:
        """True when a line is not yet written. Its stream may be blocked, so do not wait for it."""
        return self._is_writing or not self._pending.empty()

    def report_drops(self, on_drop: Callable[[], None]) -> None:
        """Call on_drop for each line dropped so far, and for each later one in the thread that drops it."""
        self._drops.report_to(on_drop)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; never blocks."""
        try:
            self._pending.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._num_late += 1
            self._drops.count()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for a short time until the queued lines are written."""
        is_written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._pending.put(is_written, timeout=_LAST_LINES_S)
            is_written.wait(_LAST_LINES_S)

    def _run(self) -> None:
        while True:
            try:
                item = self._pending.get(timeout=self._retry_s if self._num_refused else None)
            except queue.Empty:
                with contextlib.suppress(OSError, ValueError):
                    self._write_refused()
                continue
            if isinstance(item, threading.Event):
                with contextlib.suppress(OSError, ValueError):
                    self._write_refused()  # frequent flushes end the wait for a retry, so try here too
                item.set()
                continue
            self._is_writing = True
            self._write(item)
            self._is_writing = False

    def _write(self, line: str) -> None:
        try:
            self._write_refused()
            self._lines.write(line)
        except (OSError, ValueError) as error:  # a closed stream raises ValueError
            self._num_refused += 1
            self._refusal = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._drops.count()
            return
        with contextlib.suppress(OSError, ValueError):
            self._write_late()

    def _write_refused(self) -> None:
        if self._num_refused:
            self._lines.write(self._notice(self._num_refused, self._refusal))
            self._num_refused = 0

    def _write_late(self) -> None:
        if num_late := self._num_late:
            self._lines.write(self._notice(num_late, "the log was not read in time"))
            self.acquire()  # emit counts under the same lock
            self._num_late -= num_late
            self.release()

    def _notice(self, num_missing: int, reason: str) -> str:
        """Return a line about missing records, in the handler's own format, so that a JSON log stays valid."""
        record = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        message = f"{num_missing} log records are missing here: {reason}"
        return self.format(logging.makeLogRecord(record | {"msg": message})) + "\n"


class _Lines:
    """Writes lines to a stream. A line that is not written completely raises an error.

    Bypasses the stream's buffer if it has a descriptor: a buffer would keep a failed line and write it later.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False

    def write(self, line: str) -> None:
        """Write a complete line. After a partial line it starts a new one. Raises OSError or ValueError."""
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:  # a stream in memory
            self._stream.write(line)
            return
        data = line.encode(self._stream.encoding, "backslashreplace")
        if self._is_torn:
            data = b"\n" + data
        while data:
            num_written = os.write(descriptor, data)
            self._is_torn = data[num_written - 1] != ord("\n")
            data = data[num_written:]


class _Drops:
    """Count of dropped lines, reported to a function. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._on_drop: Callable[[], None] = lambda: None

    def count(self) -> None:
        """Count a dropped line."""
        with self._lock:
            self._num += 1
            self._on_drop()

    def report_to(self, on_drop: Callable[[], None]) -> None:
        """Call on_drop for every line counted so far, and for every later one."""
        with self._lock:
            self._on_drop = on_drop
            for _ in range(self._num):
                on_drop()


def is_log_behind() -> bool:
    """Return whether a handler of the process's log still has unwritten lines after a short wait."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, BackgroundHandler)]
    for handler in handlers:
        handler.flush()
    return any(handler.is_behind for handler in handlers)
