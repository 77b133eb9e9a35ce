"""Formats of log records: lines of text or of JSON, each with the id of its RPC.

A record's own fields come in `extra={"fields": {...}}`. Text from clients is never logged: for an error that occurs
while a request is read, `where_of` shows the place without the message, which might quote the request.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator
from functools import lru_cache
from typing import TextIO

from antiphon.observability.call import log_request_id
from antiphon.observability.logs.log_handler import BackgroundHandler

_PLAIN = re.compile(r"[!#-<>-~]+")  # visible ASCII but " and =
# Fields of every record of this process.
_OF_PROCESS: dict[str, object] = {}
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode


def configure_logging(
    level: str, kind: str, stream: TextIO | None = None, *, worker: int | None = None
) -> BackgroundHandler:
    """Send every record of a level or above to a stream, standard error by default. kind: text or json.

    worker: number of this process among several of a server, which every record then shows.
    Returns the handler that writes them.
    """
    handler = BackgroundHandler(stream or sys.stderr)
    if worker is not None:
        _OF_PROCESS["worker"] = worker
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    # The formats show none of these, and looking them up takes longer than the rest (documented switches of logging).
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return handler


def where_of(error: BaseException) -> str:
    """Return the tracebacks and types of an exception and its causes, causes first, without the messages."""
    lines = []
    for one in reversed(list(_chain(error))):
        lines += traceback.format_tb(one.__traceback__)
        lines.append(f"{type(one).__module__}.{type(one).__qualname__} (message not shown: it may quote the request)\n")
    return "".join(lines).rstrip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


class TextFormatter(logging.Formatter):
    """Format `time LEVEL logger: message key=value ...`, the time in UTC. Values other than plain words are JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line, followed by the lines of its exception."""
        fields = _fields(record)
        exception = fields.get("exception")
        words = "".join([f" {key}={_word(value)}" for key, value in fields.items() if key != "exception"])
        line = f"{rfc3339(record.created)} {record.levelname} {record.name}: {record.getMessage()}{words}"
        return line if exception is None else f"{line}\n{exception}"


class JsonFormatter(logging.Formatter):
    """Format with one JSON object per line: timestamp (RFC 3339, UTC), level, logger, message, the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        line: dict[str, object] = {
            "timestamp": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return _ENCODE(line | _fields(record))


def rfc3339(created_s: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339 in UTC, to the microsecond."""
    whole = int(created_s)
    return f"{_whole_second(whole)}.{int((created_s - whole) * 1e6):06d}Z"


@lru_cache(maxsize=4)
def _whole_second(since_1970: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_1970))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return a record's own fields, the id of the current RPC, and the exception as text."""
    fields: dict[str, object] = record.__dict__.get("fields", {})
    if _OF_PROCESS:
        fields = fields | _OF_PROCESS
    if "request_id" not in fields and (request_id := log_request_id.get()):
        fields = fields | {"request_id": request_id}
    if record.exc_info and record.exc_info[1] is not None:
        shown = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        fields = fields | {"exception": shown}
    return fields


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
