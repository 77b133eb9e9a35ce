"""One simulated replica: its measured speed, a bounded queue, and rows that share its capacity.

Rows share the capacity as in continuous batching: each step gives every row one token, so the progress of a request
depends on the number of running requests (processor sharing with a separate rate for every number of rows). Replicas
do not depend on each other within a step of the simulation, so each one runs alone.
"""

from __future__ import annotations

import heapq
import json
import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.flags import CapacityError

MAX_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceCurve:
    """Answers per second by number of running requests, from 1 on. Constant beyond the last point."""

    rows: tuple[int, ...]
    """Numbers of running requests of the measured points, rising."""
    answers_per_s: tuple[float, ...]
    """Answers per second of the measured points."""
    work: tuple[float, ...]
    """Evenly spaced quantiles of the work of an answer, relative to the mean."""
    origin: str
    """Machine and method of the measurement."""

    @property
    def highest_per_s(self) -> float:
        """Return the highest number of answers per second of one replica."""
        return max(self.answers_per_s)

    def at(self, num_rows: int) -> float:
        """Return answers per second with num_rows running requests, interpolated linearly between two points."""
        if num_rows <= self.rows[0]:
            return self.answers_per_s[0] * num_rows / self.rows[0]
        points = zip(self.rows, self.answers_per_s, strict=True)
        for (low, low_per_s), (high, high_per_s) in pairwise(points):
            if num_rows <= high:
                return low_per_s + (high_per_s - low_per_s) * (num_rows - low) / (high - low)
        return self.answers_per_s[-1]


def read_curve(path: Path) -> ServiceCurve:
    """Read a curve that measure_curve.py wrote. Raises CapacityError, which names the file and the field."""
    try:
        curve = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CapacityError(f"--curve {path} cannot be read: {error}") from None
    if not isinstance(curve, dict):
        raise CapacityError(f"--curve {path} is not an object of rows, answers_per_s, work")
    rows, per_s = _numbers(curve, "rows", path), _numbers(curve, "answers_per_s", path)
    work = _numbers(curve, "work", path)
    if len(rows) != len(per_s):
        raise CapacityError(f"--curve {path}: answers_per_s has {len(per_s)} entries; rows has {len(rows)}")
    if any(low >= high for low, high in pairwise(rows)) or any(row != int(row) or row > MAX_ROWS for row in rows):
        raise CapacityError(f"--curve {path}: rows must rise, whole numbers from 1 to {MAX_ROWS:,}")
    mean = sum(work) / len(work)
    return ServiceCurve(
        rows=tuple(map(int, rows)),
        answers_per_s=tuple(per_s),
        work=tuple(value / mean for value in work),
        origin=str(curve.get("origin", path.name)),
    )


def _numbers(curve: dict[str, Any], name: str, path: Path) -> Sequence[float]:
    values = curve.get(name)
    is_list = isinstance(values, list) and values
    if not is_list or any(not _is_positive(value) for value in values or ()):
        raise CapacityError(f"--curve {path}: {name} must be a list of numbers above 0")
    assert values is not None
    return [float(value) for value in values]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(slots=True)
class Answers:
    """Results of requests, in seconds: arrival, wait and latency of answered requests; arrival of refused ones."""

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    refused_s: array[float] = field(default_factory=lambda: array("d"))


class SimulatedReplica:
    """Rows, queue and clock of a replica. Writes the results of requests to `answers`, which replicas can share."""

    def __init__(self, curve: ServiceCurve, limits: EngineLimits, answers: Answers, ready_s: float) -> None:
        self.ready_s = ready_s
        self.busy_s = 0.0  # time with at least one running request
        self._limits = limits
        self._answers = answers
        # Progress of each row per second, in mean answers, by the number of rows.
        self._speeds = [0.0, *(curve.at(rows) / rows for rows in range(1, limits.max_num_seqs + 1))]
        self._most_per_s = curve.at(limits.max_num_seqs)
        self._now_s = ready_s
        self._progress = 0.0  # of a row that has run since the start
        self._running: list[tuple[float, float, float]] = []  # heap of (progress at the end, arrival, start)
        self._waiting: deque[tuple[float, float]] = deque()  # arrival, work

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def run(self, arrivals: Iterable[tuple[float, float]], until_s: float) -> None:
        """Simulate until until_s. arrivals: (time, work) of every request before that moment, in order of time."""
        for arrival_s, work in arrivals:
            self._advance(arrival_s)
            if len(self._running) < self._limits.max_num_seqs:
                heapq.heappush(self._running, (self._progress + work, arrival_s, arrival_s))
            elif self._is_taken():
                self._waiting.append((arrival_s, work))
            else:
                self._answers.refused_s.append(arrival_s)
        self._advance(until_s)

    def _is_taken(self) -> bool:
        num_waiting, limits = len(self._waiting), self._limits
        max_wait_s = math.inf if limits.max_queue_time_s is None else limits.max_queue_time_s
        return num_waiting < limits.max_queued_requests and num_waiting <= max_wait_s * self._most_per_s

    def _advance(self, until_s: float) -> None:
        running = self._running
        while running:
            speed = self._speeds[len(running)]
            end_s = self._now_s + (running[0][0] - self._progress) / speed
            if end_s > until_s:
                self._progress += (until_s - self._now_s) * speed
                self.busy_s += until_s - self._now_s
                break
            self.busy_s += end_s - self._now_s
            self._now_s = end_s
            self._end_first()
        self._now_s = until_s

    def _end_first(self) -> None:
        self._progress, arrival_s, start_s = heapq.heappop(self._running)
        answers = self._answers
        answers.arrived_s.append(arrival_s)
        answers.wait_s.append(start_s - arrival_s)
        answers.latency_s.append(self._now_s - arrival_s)
        if self._waiting:
            arrival_s, work = self._waiting.popleft()
            heapq.heappush(self._running, (self._progress + work, arrival_s, self._now_s))
