"""One replica under a simulation: a bounded queue before rows that share what the replica can do.

Rows share it as continuous batching does: each step brings every row one token, so a request's progress depends on how
many run beside it (processor sharing with a rate of its own for every number of rows). Between two moments at which
somebody looks, a replica depends on no other, so each is run by itself. Knows no wall clock.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon.service.tools.capacity.service_curve import ServiceCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLimits:
    """Bounds of a replica, as the server has them: rows, requests that wait, their longest expected wait in seconds."""

    max_rows: int
    max_waiting: int
    max_wait_s: float


@dataclass(slots=True)
class Answers:
    """What became of requests: of each answered one when it came, how long it waited, how long all took. In seconds."""

    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    refused_s: array[float] = field(default_factory=lambda: array("d"))


class SimulatedReplica:
    """Its rows, its queue and its clock; what becomes of requests goes to `answers`, which replicas may share."""

    def __init__(self, curve: ServiceCurve, limits: ReplicaLimits, answers: Answers, ready_s: float) -> None:
        self.ready_s = ready_s
        self.busy_s = 0.0  # with at least one request in service
        self._limits = limits
        self._answers = answers
        # Progress of each row a second, in mean answers, by the number of rows.
        self._speeds = [0.0, *(curve.at(rows) / rows for rows in range(1, limits.max_rows + 1))]
        self._most_per_s = curve.at(limits.max_rows)
        self._now_s = ready_s
        self._progress = 0.0  # of a row that has been there from the start
        self._running: list[tuple[float, float, float]] = []  # a heap: progress at its end, arrival, start
        self._waiting: deque[tuple[float, float]] = deque()  # arrival, work

    @property
    def num_running(self) -> int:
        """Requests in service."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def run(self, arrivals: Iterable[tuple[float, float]], until_s: float) -> None:
        """Live until a moment, with requests that come before it: when each comes, in order, and its work."""
        for arrival_s, work in arrivals:
            self._advance(arrival_s)
            if len(self._running) < self._limits.max_rows:
                heapq.heappush(self._running, (self._progress + work, arrival_s, arrival_s))
            elif self._is_taken():
                self._waiting.append((arrival_s, work))
            else:
                self._answers.refused_s.append(arrival_s)
        self._advance(until_s)

    def _is_taken(self) -> bool:
        num_waiting, limits = len(self._waiting), self._limits
        return num_waiting < limits.max_waiting and num_waiting <= limits.max_wait_s * self._most_per_s

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
