"""The algorithm of Kubernetes' HorizontalPodAutoscaler, as in its documentation and its controller.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ (algorithm details; configurable scaling
behavior), pkg/controller/podautoscaler/horizontal.go and replica_calculator.go, Kubernetes 1.33. Not simulated: pods
that are not ready or have no metrics (they matter for resource metrics only), and metrics that are unavailable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Defaults of the controller: --horizontal-pod-autoscaler-tolerance, -sync-period.
TOLERANCE = 0.1
SYNC_PERIOD_S = 15.0

Select = Literal["Max", "Min", "Disabled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Maximum change within a period, in pods or in percent of the pods."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules of `behavior` for one direction, up or down."""

    window_s: float
    select: Select
    policies: tuple[Policy, ...]


# Defaults of Kubernetes for a direction that `behavior` does not define.
DEFAULT_UP = Rules(
    window_s=0,
    select="Max",
    policies=(Policy(kind="Percent", value=100, period_s=15), Policy(kind="Pods", value=4, period_s=15)),
)
DEFAULT_DOWN = Rules(window_s=300, select="Max", policies=(Policy(kind="Percent", value=100, period_s=15),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Limits of the number of replicas, and of its rate of change."""

    min_replicas: int
    max_replicas: int
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN


def desired_by_average(current: int, total: float, target: float) -> int:
    """Return replicas for an external metric with an AverageValue: ceil(total / target), except within tolerance."""
    if abs(total / (target * current) - 1) <= TOLERANCE:
        return current
    return math.ceil(total / target)


def desired_by_ratio(current: int, value: float, target: float) -> int:
    """Return replicas for a mean over pods, such as CPU: ceil(current * value / target), except within tolerance."""
    if abs(value / target - 1) <= TOLERANCE:
        return current
    return math.ceil(current * value / target)


class Autoscaler:
    """State of the controller: its recommendations and its changes, with their times."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._wanted: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []  # replicas added; below 0, taken away

    def decide(self, now_s: float, current: int, desired: Sequence[int]) -> int:
        """Return the new number of replicas from the number that each metric desires.

        The largest number counts. It is stabilised, then limited by the policies and by the minimum and maximum.
        """
        wanted = max(desired)
        stable = self._stabilised(now_s, current, wanted)
        decided = self._slowed(now_s, current, stable)
        if decided != current:
            self._changes.append((now_s, decided - current))
        return decided

    def _stabilised(self, now_s: float, current: int, wanted: int) -> int:
        """Limit a rise to the least, and a fall to the largest, recommendation within the window of its direction."""
        up, down = self._scaling.up.window_s, self._scaling.down.window_s
        self._wanted = [one for one in self._wanted if one[0] > now_s - max(up, down)] + [(now_s, wanted)]
        least = min(count for time_s, count in self._wanted if time_s > now_s - up or time_s == now_s)
        most = max(count for time_s, count in self._wanted if time_s > now_s - down or time_s == now_s)
        return min(max(current, least), most)

    def _slowed(self, now_s: float, current: int, stable: int) -> int:
        scaling = self._scaling
        if stable > current:
            return max(current, min(stable, self._limit(now_s, current, scaling.up, +1), scaling.max_replicas))
        if stable < current:
            return min(current, max(stable, self._limit(now_s, current, scaling.down, -1), scaling.min_replicas))
        return min(max(current, scaling.min_replicas), scaling.max_replicas)

    def _limit(self, now_s: float, current: int, rules: Rules, sign: int) -> int:
        """Return the limit that the policies of a direction allow, counted from the start of the period of each."""
        if rules.select == "Disabled":
            return current
        reached = []
        for policy in rules.policies:
            began = current - sum(count for time_s, count in self._changes if time_s > now_s - policy.period_s)
            if policy.kind == "Pods":
                reached.append(began + sign * policy.value)
            else:
                part = began * (1 + sign * policy.value / 100)
                # The controller rounds up when it scales up and truncates when it scales down. 1e-9 corrects the
                # rounding errors of products such as 80 * 0.9.
                reached.append(math.ceil(part - 1e-9) if sign > 0 else math.floor(part + 1e-9))
        is_far = (rules.select == "Max") == (sign > 0)
        return max(reached) if is_far else min(reached)
