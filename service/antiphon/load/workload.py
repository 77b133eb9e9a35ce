"""Workload of a test: texts of requests, traces, and arrival times, which do not depend on the server.

A trace has times and lengths of requests, as JSON lines, or as CSV with a header of the same names.

{"time_s": 0.0, "text": "How are you?"}
{"time_s": 0.31, "source_tokens": 24, "max_new_tokens": 40}
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.load.plan import Plan, PlanError

EVERYDAY = (
    "Stop!",
    "How are you?",
    "Thank you very much.",
    "I don't know.",
    "It's raining again.",
    "Where is the station?",
    "She reads a book every week.",
    "He has three dogs and a cat.",
    "Can you help me with this, please?",
    "We were late because of the snow.",
    "The weather is nice today, isn't it?",
    "What time does the next train leave?",
    "My brother works in a hospital in the city.",
    "I would like a cup of coffee without sugar.",
    "They have lived in the same house for ten years.",
    "Could you tell me how to get to the museum?",
    "The children are playing football behind the school.",
    "I forgot my umbrella at the office this morning.",
    "If you are hungry, there is some soup in the kitchen.",
    "My sister wants to learn German because she likes the language.",
    "The doctor told him to drink more water and to sleep longer.",
    "We went to bed early, since we were tired after the long journey.",
    "He asked me whether I had seen the letter that lay on the table.",
    "When I was a child, I spent every summer with my grandparents by the sea.",
    "The shop at the corner sells bread, milk, and vegetables, but it is closed on Sundays.",
)
_ORDER_SEED = 1
_TRACE_FIELDS = ("time_s", "text", "source_tokens", "max_new_tokens")

Arrival = tuple[float, int]
"""Seconds since the start, and index of the ask in the plan."""


def read_texts(name: str | None) -> list[str]:
    """Read the lines of a file, or of standard input for '-', without blank ones. None: everyday sentences.

    The order is random and fixed: files of sentences are often sorted by length, and traffic is not. Raises PlanError.
    """
    texts = [text for text in (EVERYDAY if name is None else _read_input(name).split("\n")) if text.strip()]
    if not texts:
        raise PlanError(f"--input {name} holds no text")
    return shuffled(texts)


def shuffled(texts: Sequence[str]) -> list[str]:
    """Return the texts in a fixed random order."""
    return random.Random(_ORDER_SEED).sample(list(texts), len(texts))


def read_file(flag: str, path: Path) -> str:
    """Read the text of a file. Raises PlanError, which names the flag."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{flag} {path} cannot be read: {error}") from None


def _read_input(name: str) -> str:
    if name != "-":
        return read_file("--input", Path(name))
    if sys.stdin is None:
        raise PlanError("--input - cannot be read: standard input is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--input - cannot be read: {error}") from None


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
    unknown = [str(name) for name in row if name not in _TRACE_FIELDS]
    if unknown:
        raise PlanError(f"{where}: unknown field {unknown[0]}; allowed are {', '.join(_TRACE_FIELDS)}")
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


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return Poisson arrival times from 0 to `seconds`, on average `rate` per second; at least one."""
    return list(poisson_times(rate, seconds, seed))


def poisson_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of `poisson_arrivals` one by one, for runs of hours."""
    rng = random.Random(seed)
    time_s = rng.expovariate(rate)
    yield time_s
    while (time_s := time_s + rng.expovariate(rate)) < seconds:
        yield time_s


def arrivals_of(plan: Plan) -> Iterator[float]:
    """Return every arrival time of a plan, ascending."""
    if plan.times_s is not None:
        return iter(plan.times_s[: bisect_left(plan.times_s, plan.end_s)])
    assert plan.rate is not None
    return poisson_times(plan.rate, plan.end_s, plan.seed)


def share_of(plan: Plan, process: int) -> Iterator[Arrival]:
    """Return every n-th arrival for one of n processes. Together the processes send exactly the plan's arrivals."""
    turns = zip(arrivals_of(plan), itertools.cycle(range(len(plan.asks))), strict=False)
    return itertools.islice(turns, process, None, plan.processes)
