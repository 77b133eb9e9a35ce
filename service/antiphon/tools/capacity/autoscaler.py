"""The autoscaler: the algorithm of Kubernetes' HorizontalPodAutoscaler, and the reader of KEDA's ScaledObject.

The algorithm is that of its documentation and its controller:
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/ (algorithm details; configurable scaling
behavior), pkg/controller/podautoscaler/horizontal.go and replica_calculator.go, Kubernetes 1.33. Not simulated: pods
that are not ready or have no metrics (they matter for resource metrics only), and metrics that are unavailable.

The simulation reads the shipped ScaledObject, so that it simulates what is deployed. KEDA creates a
HorizontalPodAutoscaler from it, whose controller queries each metric every 15 s. pollingInterval is the period of the
queries of KEDA itself. They decide only between zero and one replica, and determine the age of cached answers
(https://keda.sh/docs/latest/reference/scaledobject-spec/). Needs PyYAML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from antiphon.tools.capacity.flags import CapacityError

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
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []  # replicas added; below 0, taken away

    def decide(self, now_s: float, current: int, desired: Sequence[int]) -> int:
        """Return the new number of replicas from the number that each metric desires.

        The largest number counts. It is stabilised, then limited by the policies and by the minimum and maximum.
        """
        recommended = max(desired)
        stable = self._stabilised(now_s, current, recommended)
        decided = self._slowed(now_s, current, stable)
        if decided != current:
            self._changes.append((now_s, decided - current))
        return decided

    def _stabilised(self, now_s: float, current: int, recommended: int) -> int:
        """Limit a rise to the least, and a fall to the largest, recommendation within the window of its direction."""
        up, down = self._scaling.up.window_s, self._scaling.down.window_s
        recent = [(time_s, count) for time_s, count in self._recommended if time_s > now_s - max(up, down)]
        self._recommended = [*recent, (now_s, recommended)]
        lowest = min(count for time_s, count in self._recommended if time_s > now_s - up or time_s == now_s)
        highest = max(count for time_s, count in self._recommended if time_s > now_s - down or time_s == now_s)
        return min(max(current, lowest), highest)

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


# Simulated metrics, by the name of the metric in a trigger's query.
METRICS = {
    "antiphon_num_requests_waiting": "waiting",
    "antiphon_num_requests_running": "running",
    "antiphon_kv_cache_usage_ratio": "cache",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """Metric with target AverageValue: "waiting" or "running" requests, "cache" use, or "cpu" use for comparison."""

    metric: str
    target: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledObject:
    """Limits, behaviour and triggers of a ScaledObject."""

    scaling: Scaling
    triggers: tuple[Trigger, ...]

    def with_triggers(self, *triggers: Trigger) -> ScaledObject:
        """Return a copy with other triggers."""
        return replace(self, triggers=triggers)


def read_scaled_object(path: Path) -> ScaledObject:
    """Read the ScaledObject of a file. Raises CapacityError, which names the field."""
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CapacityError(f"--scaled-object {path} cannot be read: {error}") from None
    objects = [item for item in documents if isinstance(item, dict) and item.get("kind") == "ScaledObject"]
    if len(objects) != 1:
        raise CapacityError(f"--scaled-object {path} holds {len(objects)} objects of kind ScaledObject, not one")
    try:
        return _read(objects[0]["spec"])
    except KeyError as error:
        raise CapacityError(f"--scaled-object {path}: {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CapacityError(f"--scaled-object {path}: {error}") from None


def _read(spec: Mapping[str, Any]) -> ScaledObject:
    behavior = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
    # KEDA's defaults: at least 0, at most 100. The simulation needs at least one replica.
    lowest, highest = int(spec.get("minReplicaCount", 0)), int(spec.get("maxReplicaCount", 100))
    if not 1 <= lowest <= highest:
        raise ValueError(f"minReplicaCount is {lowest}; it must be from 1 to maxReplicaCount, {highest}")
    scaling = Scaling(
        min_replicas=lowest,
        max_replicas=highest,
        up=_rules(behavior.get("scaleUp"), DEFAULT_UP),
        down=_rules(behavior.get("scaleDown"), DEFAULT_DOWN),
    )
    return ScaledObject(scaling=scaling, triggers=tuple(_trigger(trigger) for trigger in spec["triggers"]))


def _rules(rules: Mapping[str, Any] | None, default: Rules) -> Rules:
    if rules is None:
        return default
    return Rules(
        window_s=float(rules.get("stabilizationWindowSeconds", default.window_s)),
        select=rules.get("selectPolicy", default.select),
        policies=_policies(rules["policies"]) if "policies" in rules else default.policies,
    )


def _policies(policies: Sequence[Mapping[str, Any]]) -> tuple[Policy, ...]:
    for policy in policies:
        if policy["type"] not in ("Pods", "Percent"):
            raise ValueError(f"a policy has the type {policy['type']!r}; it must be Pods or Percent")
    return tuple(
        Policy(kind=policy["type"], value=int(policy["value"]), period_s=float(policy["periodSeconds"]))
        for policy in policies
    )


def _trigger(trigger: Mapping[str, Any]) -> Trigger:
    metadata = trigger["metadata"]
    if trigger.get("metricType", "AverageValue") != "AverageValue":
        raise ValueError(f"a trigger has the metricType {trigger['metricType']!r}; it must be AverageValue")
    named = [metric for name, metric in METRICS.items() if name in metadata["query"]]
    if len(named) != 1:
        raise ValueError(f"a trigger asks for {metadata['query']!r}; it must be about one of {', '.join(METRICS)}")
    return Trigger(metric=named[0], target=float(metadata["threshold"]))
