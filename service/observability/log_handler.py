"""Writes log records from a thread of its own, so that nobody who serves waits for whoever reads the log.

Standard error is a pipe as a rule: while its reader is slow, or a disk behind it full, a write waits, and the event
loop with it, which answers every client and every probe. Every line that does not get out is counted.
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

# Lines that wait for a slow reader: some megabytes, and several seconds of the densest log.
MAX_PENDING_LINES = 10_000
# How long the last lines may take when the process ends.
_LAST_LINES_S = 1.0
# How often a stream that refused lines is tried again while no further line comes.
_RETRY_S = 5.0


class BackgroundHandler(logging.Handler):
    """Formats a record where it is made, and writes it to a stream in the background, in order.

    A line is dropped where MAX_PENDING_LINES wait already, or where the stream refuses it: a full disk, a pipe whose
    reader has gone. The log says how many are missing as soon as the stream takes lines again.
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
        """Whether a line is still to be written: its stream may take no more, and is not to be waited for."""
        return self._is_writing or not self._pending.empty()

    def report_drops(self, on_drop: Callable[[], None]) -> None:
        """Call on_drop for each line dropped so far, and for each later one from the thread that drops it."""
        self._drops.report_to(on_drop)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; never waits."""
        try:
            self._pending.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._num_late += 1
            self._drops.count()
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
            try:
                item = self._pending.get(timeout=self._retry_s if self._num_refused else None)
            except queue.Empty:
                with contextlib.suppress(OSError, ValueError):
                    self._tell_refused()
                continue
            if isinstance(item, threading.Event):
                with contextlib.suppress(OSError, ValueError):
                    self._tell_refused()  # or frequent flushes, which end the wait for a retry, would hold it back
                item.set()
                continue
            self._is_writing = True
            self._write(item)
            self._is_writing = False

    def _write(self, line: str) -> None:
        try:
            self._tell_refused()
            self._lines.write(line)
        except (OSError, ValueError) as error:  # of a stream that was closed: ValueError
            self._num_refused += 1
            self._refusal = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._drops.count()
            return
        with contextlib.suppress(OSError, ValueError):
            self._tell_late()

    def _tell_refused(self) -> None:
        if self._num_refused:
            self._lines.write(self._notice(self._num_refused, self._refusal))
            self._num_refused = 0

    def _tell_late(self) -> None:
        if num_late := self._num_late:
            self._lines.write(self._notice(num_late, "the log was not read in time"))
            self.acquire()  # emit counts under the same lock
            self._num_late -= num_late
            self.release()

    def _notice(self, num_missing: int, reason: str) -> str:
        """Format a record of our own, so that a log of JSON stays one."""
        record = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        message = f"{num_missing} log records are missing here: {reason}"
        return self.format(logging.makeLogRecord(record | {"msg": message})) + "\n"


class _Lines:
    """Writes lines to a stream, each whole or reported as refused.

    Past the stream's buffer where it has a descriptor: a buffer keeps what a full disk refused, and writes it later.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False

    def write(self, line: str) -> None:
        """Write a line to its end; after a part of one, on a line of its own. Raises OSError or ValueError."""
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:  # in memory
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
    """Count of lines that were dropped, which is reported to one function. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num = 0
        self._on_drop: Callable[[], None] = lambda: None

    def count(self) -> None:
        """Count a line."""
        with self._lock:
            self._num += 1
            self._on_drop()

    def report_to(self, on_drop: Callable[[], None]) -> None:
        """Call on_drop for every line counted so far, and from now on for each."""
        with self._lock:
            self._on_drop = on_drop
            for _ in range(self._num):
                on_drop()


def is_log_behind() -> bool:
    """Whether a handler of the process's log still has lines, though they were waited for."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, BackgroundHandler)]
    for handler in handlers:
        handler.flush()
    return any(handler.is_behind for handler in handlers)
