"""One simulated replica: a bounded queue, and rows that share the capacity of the replica.

Rows share the capacity as in continuous batching: each step gives every row one token, so the progress of a request
depends on the number of running requests (processor sharing with a separate rate for every number of rows). Replicas
do not depend on each other within a step of the simulation, so each one runs alone. Knows no wall clock.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.simulation.service_curve import ServiceCurve


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
