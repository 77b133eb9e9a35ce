"""Reader of traces: times and lengths of requests, as JSON lines, or as CSV with a header of the same names.

{"time_s": 0.0, "text": "How are you?"}
{"time_s": 0.31, "source_tokens": 24, "max_new_tokens": 40}
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.load.plan import PlanError
from antiphon.load.workload.texts import read_file

_FIELDS = ("time_s", "text", "source_tokens", "max_new_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One request of a trace: its text, or its number of source tokens, end token included.

    time_s: seconds since the first request of the trace. max_new_tokens: None takes the model's default.
    """

    time_s: float
    text: str | None = None
    source_tokens: int | None = None
    max_new_tokens: int | None = None


def read_trace(path: Path) -> list[Entry]:
    """Read the entries of a trace, in order of time. Raises PlanError, which names file, line and field."""
    text = read_file("--trace", path)
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    entries = sorted((_entry(where, row) for where, row in rows), key=lambda entry: entry.time_s)
    if not entries:
        raise PlanError(f"--trace {path} holds no request")
    first_s = entries[0].time_s
    return [
        Entry(
            time_s=entry.time_s - first_s,
            text=entry.text,
            source_tokens=entry.source_tokens,
            max_new_tokens=entry.max_new_tokens,
        )
        for entry in entries
    ]


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"--trace {path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PlanError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise PlanError(f"{where}: not a JSON object")
        yield where, row


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    if "time_s" not in (reader.fieldnames or ()):
        raise PlanError(f"--trace {path}: neither JSON lines nor CSV whose header names time_s")
    try:
        for row in reader:
            yield f"--trace {path}, line {reader.line_num}", {name: value for name, value in row.items() if value}
    except csv.Error as error:
        raise PlanError(f"--trace {path}, line {reader.line_num}: not CSV: {error}") from None


def _entry(where: str, row: Mapping[str, Any]) -> Entry:
    unknown = [str(name) for name in row if name not in _FIELDS]
    if unknown:
        raise PlanError(f"{where}: unknown field {unknown[0]}; allowed are {', '.join(_FIELDS)}")
    if ("text" in row) == ("source_tokens" in row):
        raise PlanError(f"{where}: give either text or source_tokens")
    text = row.get("text")
    if text is not None and not isinstance(text, str):
        raise PlanError(f"{where}: text is {text!r}; it must be a string")
    return Entry(
        time_s=_time(where, row.get("time_s")),
        text=text,
        source_tokens=_count(where, "source_tokens", row.get("source_tokens")),
        max_new_tokens=_count(where, "max_new_tokens", row.get("max_new_tokens")),
    )


def _time(where: str, value: object) -> float:
    try:
        time_s = float(value)  # type: ignore[arg-type]  # any value that JSON can contain
    except (TypeError, ValueError):
        time_s = math.nan
    if not math.isfinite(time_s):
        raise PlanError(f"{where}: time_s is {value!r}; it must be a number of seconds")
    return time_s


def _count(where: str, name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise PlanError(f"{where}: {name} is {value!r}; it must be a whole number of at least 1")
    return count
