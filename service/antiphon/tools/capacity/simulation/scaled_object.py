"""Reader of KEDA's ScaledObject. The simulation reads the shipped file, so that it simulates what is deployed.

KEDA creates a HorizontalPodAutoscaler from it, whose controller queries each metric every 15 s. pollingInterval is the
period of KEDA's own queries. They decide only between zero and one replica, and determine the age of cached answers
(https://keda.sh/docs/latest/reference/scaledobject-spec/). Needs PyYAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from antiphon.tools.capacity.replicas import CapacityError
from antiphon.tools.capacity.simulation.autoscaler import DEFAULT_DOWN, DEFAULT_UP, Policy, Rules, Scaling

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
        found = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CapacityError(f"--scaled-object {path} cannot be read: {error}") from None
    objects = [one for one in found if isinstance(one, dict) and one.get("kind") == "ScaledObject"]
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
    return ScaledObject(scaling=scaling, triggers=tuple(_trigger(one) for one in spec["triggers"]))


def _rules(found: Mapping[str, Any] | None, default: Rules) -> Rules:
    if found is None:
        return default
    return Rules(
        window_s=float(found.get("stabilizationWindowSeconds", default.window_s)),
        select=found.get("selectPolicy", default.select),
        policies=_policies(found["policies"]) if "policies" in found else default.policies,
    )


def _policies(found: Sequence[Mapping[str, Any]]) -> tuple[Policy, ...]:
    for one in found:
        if one["type"] not in ("Pods", "Percent"):
            raise ValueError(f"a policy has the type {one['type']!r}; it must be Pods or Percent")
    return tuple(
        Policy(kind=one["type"], value=int(one["value"]), period_s=float(one["periodSeconds"])) for one in found
    )


def _trigger(found: Mapping[str, Any]) -> Trigger:
    metadata = found["metadata"]
    if found.get("metricType", "AverageValue") != "AverageValue":
        raise ValueError(f"a trigger has the metricType {found['metricType']!r}; it must be AverageValue")
    named = [metric for name, metric in METRICS.items() if name in metadata["query"]]
    if len(named) != 1:
        raise ValueError(f"a trigger asks for {metadata['query']!r}; it must be about one of {', '.join(METRICS)}")
    return Trigger(metric=named[0], target=float(metadata["threshold"]))
