"""Log of the process: formats of records, and the thread that writes them.

Records are lines of text or of JSON, each with the id of its RPC. A record's own fields come in
`extra={"fields": {...}}`. Text from clients is never logged: for an error that occurs while a request is read,
`where_of` shows the place without the message, which might quote the request.

Serving never waits for the reader of the log. Standard error is usually a pipe: if its reader is slow or the disk
behind it is full, a write blocks, and in the event loop that would block every client and every probe. Every line that
is not written is counted.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TextIO

from antiphon.observability.call import log_request_id

# Maximum number of lines that wait for a slow reader: some megabytes, several seconds of the busiest log.
MAX_PENDING_LINES = 10_000
# Time for the last lines when the process ends.
_LAST_LINES_S = 1.0
# Characters of lines that wait after which no further line joins the same write. Under overload each refused call has a
# line, and a system call for each takes longer than to format it.
_MAX_JOINED = 16_384
# Delay before a stream that failed is tried again, if there is no further line.
_RETRY_S = 5.0

_PLAIN = re.compile(r"[!#-<>-~]+")  # visible ASCII but " and =
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode


def configure_logging(
    level: str, kind: str, stream: TextIO | None = None, *, worker: int | None = None
) -> BackgroundHandler:
    """Send every record of a level or above to a stream, standard error by default. kind: text or json.

    worker: number of this process among several of a server, which every record then shows.
    Returns the handler that writes them.
    """
    handler = BackgroundHandler(stream or sys.stderr)
    fields_of_process = {} if worker is None else {"worker": worker}
    handler.setFormatter((JsonFormatter if kind == "json" else TextFormatter)(fields_of_process))
    # The formats show none of these, and looking them up takes longer than the rest (documented switches of logging).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler


def is_log_behind() -> bool:
    """Return whether a handler of the process's log still has unwritten lines after a short wait."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, BackgroundHandler)]
    for handler in handlers:
        handler.flush()
    return any(handler.is_behind for handler in handlers)


def where_of(error: BaseException) -> str:
    """Return the tracebacks and types of an exception and its causes, causes first, without the messages."""
    lines = []
    for cause in reversed(list(_chain(error))):
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        lines += [*traceback.format_tb(cause.__traceback__), f"{kind} (message not shown: it may quote the request)\n"]
    return "".join(lines).rstrip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


class _FieldsFormatter(logging.Formatter):
    """Format with fields. of_process: fields of every record of this process."""

    def __init__(self, of_process: Mapping[str, object]) -> None:
        super().__init__()
        self._of_process = dict(of_process)

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Return a record's own fields, the id of the current RPC, and the exception as text."""
        fields: dict[str, object] = record.__dict__.get("fields", {})
        if self._of_process:
            fields = fields | self._of_process
        if "request_id" not in fields and (request_id := log_request_id.get()):
            fields = fields | {"request_id": request_id}
        if record.exc_info and record.exc_info[1] is not None:
            shown = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
            fields = fields | {"exception": shown}
        return fields


class TextFormatter(_FieldsFormatter):
    """Format `time LEVEL logger: message key=value ...`, the time in UTC. Values other than plain words are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line, followed by the lines of its exception."""
        fields = self.fields(record)
        exception = fields.get("exception")
        words = "".join([f" {key}={_word(value)}" for key, value in fields.items() if key != "exception"])
        line = f"{rfc3339(record.created)} {record.levelname} {record.name}: {record.getMessage()}{words}"
        return line if exception is None else f"{line}\n{exception}"


class JsonFormatter(_FieldsFormatter):
    """Format with one JSON object per line: timestamp (RFC 3339, UTC), level, logger, message, the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        line: dict[str, object] = {
            "timestamp": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return _ENCODE(line | self.fields(record))


def rfc3339(created_s: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339 in UTC, to the microsecond."""
    whole = int(created_s)
    return f"{_whole_second(whole)}.{int((created_s - whole) * 1e6):06d}Z"


@lru_cache(maxsize=4)
def _whole_second(since_1970: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_1970))


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


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
            lines, flush = self._joined(item)
            self._write(lines)
            self._is_writing = False
            if flush is not None:
                flush.set()

    def _joined(self, line: str) -> tuple[list[str], threading.Event | None]:
        """Return a line and those that wait behind it, to be written at once, and the flush that waits for them."""
        lines, num_characters = [line], len(line)
        while num_characters < _MAX_JOINED:
            try:
                item = self._pending.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, threading.Event):
                return lines, item
            lines.append(item)
            num_characters += len(item)
        return lines, None

    def _write(self, lines: list[str]) -> None:
        try:
            self._write_refused()
            self._lines.write(lines)
        except (OSError, ValueError) as error:  # a closed stream raises ValueError
            num_lost = len(lines) - self._lines.num_written
            self._num_refused += num_lost
            self._refusal = (error.strerror if isinstance(error, OSError) else None) or str(error)
            for _ in range(num_lost):
                self._drops.count()
            return
        with contextlib.suppress(OSError, ValueError):
            self._write_late()

    def _write_refused(self) -> None:
        if self._num_refused:
            self._lines.write([self._notice(self._num_refused, self._refusal)])
            self._num_refused = 0

    def _write_late(self) -> None:
        if num_late := self._num_late:
            self._lines.write([self._notice(num_late, "the log was not read in time")])
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
    num_written: lines of the last call that were written completely.
    """

    def __init__(self, stream: TextIO) -> None:
        self.num_written = 0
        self._stream = stream
        self._is_torn = False

    def write(self, lines: Sequence[str]) -> None:
        """Write complete lines. After a partial line it starts a new one. Raises OSError or ValueError."""
        self.num_written = 0
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:  # a stream in memory
            self._stream.write("".join(lines))
            self.num_written = len(lines)
            return
        encoded = [line.encode(self._stream.encoding, "backslashreplace") for line in lines]
        if self._is_torn:
            encoded[0] = b"\n" + encoded[0]
        data, num_bytes = b"".join(encoded), 0
        try:
            while num_bytes < len(data):
                num_bytes += os.write(descriptor, data[num_bytes:])
                self._is_torn = data[num_bytes - 1] != ord("\n")
        finally:
            self.num_written = bisect.bisect_right(list(itertools.accumulate(map(len, encoded))), num_bytes)


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
