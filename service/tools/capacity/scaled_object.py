"""Reads KEDA's ScaledObject as it is shipped, so that what is simulated is what is applied.

KEDA makes a HorizontalPodAutoscaler of it, whose controller asks for each metric every 15 s; pollingInterval is how
often KEDA itself asks, which decides only between none and one replica, and is what a cached answer's age comes from
(https://keda.sh/docs/latest/reference/scaledobject-spec/). Needs PyYAML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from antiphon.service.tools.capacity.autoscaler import DEFAULT_DOWN, DEFAULT_UP, Policy, Rules, Scaling
from antiphon.service.tools.capacity.replicas import CapacityError

# What can be simulated, by what a trigger's query asks for.
METRICS = {
    "antiphon_num_requests_waiting": "waiting",
    "antiphon_num_requests_running": "running",
    "antiphon_kv_cache_usage_ratio": "cache",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trigger:
    """A metric with target AverageValue: waiting and running requests, cache use; CPU use, for contrast."""

    metric: str
    target: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledObject:
    """Bounds, behaviour and triggers."""

    scaling: Scaling
    triggers: tuple[Trigger, ...]

    def with_triggers(self, *triggers: Trigger) -> ScaledObject:
        """The same with other triggers."""
        return replace(self, triggers=triggers)


def read_scaled_object(path: Path) -> ScaledObject:
    """The ScaledObject of a file. Raises CapacityError naming the field."""
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
    # KEDA's defaults: none at least, 100 at most. Simulated is what happens from one replica on.
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
