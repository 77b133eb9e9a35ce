"""Simulation of a Deployment over a day: its replicas start, share the traffic, are scaled, drain and end.

Time advances in steps of the autoscaler's period. Within a step, requests are spread over the replicas that clients
know. At the end of a step the autoscaler decides. Every request is simulated individually.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.autoscaler import (
    SYNC_PERIOD_S,
    Autoscaler,
    ScaledObject,
    Trigger,
    desired_by_average,
    desired_by_ratio,
)
from antiphon.tools.capacity.simulated_replica import Answers, ServiceCurve, SimulatedReplica
from antiphon.tools.capacity.traffic import Floats, Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Environment of the replicas."""

    start_s: float
    """Time from the decision to a pod's readiness."""
    discovery_s: float
    """Time until all clients know a new replica: the server's max_connection_age_s; 0 behind a proxy that watches
    endpoints."""
    cache_of_full_rows: float
    """Share of the cache blocks in use while every row runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """State of the fleet at one moment."""

    time_s: float
    rate: float
    ready: int
    replicas: int
    waiting: int
    """Waiting requests."""
    running: int
    """Running requests."""
    cpu: float
    """Busy share of the last period."""


@dataclass(slots=True)
class Outcome:
    """Result of a simulated day: every answer, and the state of the fleet at every step."""

    answers: Answers = field(default_factory=Answers)
    samples: list[Sample] = field(default_factory=list)
    replica_s: float = 0.0


class Fleet:
    """Simulated replicas with their clients and their autoscaler. scaled: None keeps the initial number of replicas."""

    def __init__(
        self, curve: ServiceCurve, limits: EngineLimits, environment: Environment, scaled: ScaledObject | None
    ) -> None:
        self._curve = curve
        self._limits = limits
        self._environment = environment
        self._scaled = scaled
        self._autoscaler = Autoscaler(scaled.scaling) if scaled is not None else None
        self.outcome = Outcome()
        self._replicas: list[SimulatedReplica] = []
        self._draining: list[SimulatedReplica] = []
        self._seen: Sample | None = None

    def run(self, traffic: Traffic, first: int, seed: int) -> Outcome:
        """Simulate the traffic with `first` replicas at the start, which all clients know."""
        rng = np.random.default_rng(seed)
        self._replicas = [self._new(-self._environment.discovery_s) for _ in range(first)]
        for now_s in np.arange(0, traffic.duration_s, SYNC_PERIOD_S).tolist():
            self._step(now_s, min(now_s + SYNC_PERIOD_S, traffic.duration_s), traffic, rng)
        return self.outcome

    def _new(self, ready_s: float) -> SimulatedReplica:
        return SimulatedReplica(self._curve, self._limits, self.outcome.answers, ready_s)

    def _step(self, now_s: float, end_s: float, traffic: Traffic, rng: np.random.Generator) -> None:
        arrivals = traffic.arrivals(now_s, end_s, rng)
        work = rng.choice(self._curve.work, len(arrivals))
        busy_s = [replica.busy_s for replica in self._replicas]
        for replica, own in zip(self._replicas, self._spread(arrivals, now_s, rng), strict=True):
            replica.run(zip(arrivals[own].tolist(), work[own].tolist(), strict=True), end_s)
        for replica in self._draining:
            replica.run((), end_s)
        self._draining = [replica for replica in self._draining if replica.num_running]
        self.outcome.replica_s += (len(self._replicas) + len(self._draining)) * (end_s - now_s)
        self._sample(end_s, end_s - now_s, traffic.at(now_s), busy_s)
        if self._scaled is not None and self._autoscaler is not None:
            self._scale(end_s, self._autoscaler, self._scaled)

    def _spread(self, arrivals: Floats, now_s: float, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Assign requests to replicas at random: the sum of many clients that each use round robin."""
        shares = np.array([self._known(replica, now_s) for replica in self._replicas])
        chosen = rng.choice(len(shares), len(arrivals), p=shares / shares.sum())
        return [np.flatnonzero(chosen == index) for index in range(len(shares))]

    def _known(self, replica: SimulatedReplica, now_s: float) -> float:
        age_s = now_s - replica.ready_s
        if age_s < 0:
            return 0.0
        return min(1.0, age_s / self._environment.discovery_s) if self._environment.discovery_s else 1.0

    def _sample(self, end_s: float, length_s: float, rate: float, busy_s: Sequence[float]) -> None:
        used = [replica.busy_s - before for replica, before in zip(self._replicas, busy_s, strict=True)]
        ready = [replica.ready_s <= end_s for replica in self._replicas]
        self.outcome.samples.append(
            Sample(
                time_s=end_s,
                rate=rate,
                ready=sum(ready),
                replicas=len(self._replicas),
                waiting=sum(replica.num_waiting for replica in self._replicas),
                running=sum(replica.num_running for replica in self._replicas),
                cpu=sum(used) / (sum(ready) * length_s),
            )
        )

    def _scale(self, now_s: float, autoscaler: Autoscaler, scaled: ScaledObject) -> None:
        """Decide from the metrics of the previous period, since scraped metrics can be that old; then scrape."""
        current = len(self._replicas)
        if self._seen is not None:
            desired = [self._desired(trigger, current, self._seen) for trigger in scaled.triggers]
            self._resize(now_s, autoscaler.decide(now_s, current, desired))
        self._seen = self.outcome.samples[-1]

    def _desired(self, trigger: Trigger, current: int, seen: Sample) -> int:
        if trigger.metric == "waiting":
            return desired_by_average(current, seen.waiting, trigger.target)
        if trigger.metric == "running":
            return desired_by_average(current, seen.running, trigger.target)
        if trigger.metric == "cache":
            in_use = self._environment.cache_of_full_rows * seen.running / self._limits.max_num_seqs
            return desired_by_average(current, in_use, trigger.target)
        return desired_by_ratio(current, seen.cpu, trigger.target)

    def _resize(self, now_s: float, count: int) -> None:
        """Start replicas, or drain the youngest ones, which Kubernetes removes first."""
        for _ in range(count - len(self._replicas)):
            self._replicas.append(self._new(now_s + self._environment.start_s))
        while len(self._replicas) > count:
            self._draining.append(self._replicas.pop())
