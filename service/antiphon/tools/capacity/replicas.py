"""Number of replicas for a rate, from the rate that one replica sustains. Pure arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CapacityError(Exception):
    """Capacity cannot be planned; the message names the flag or file, and the allowed values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceRate:
    """Requests per second that one replica sustains, and the origin of this figure."""

    requests_per_s: float
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Total requests per second, and the failures that must not reduce the rate.

    utilisation: planned share of the rate that a replica sustains. spare: number of replicas that can fail at once.
    zones: number of zones; one zone can fail with all of its replicas. 1: no zone can fail.
    clients: client processes, each connected to every replica. call_bytes: bytes of a call in both directions.
    """

    requests_per_s: float
    utilisation: float
    spare: int
    zones: int
    clients: int
    call_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Number of replicas: needed for the rate, planned to run, and lost, which can fail at once."""

    needed: int
    planned: int
    lost: int


def replicas_for(demand: Demand, rate: ServiceRate) -> Replicas:
    """Return the number of replicas such that the rest after a failure carries the rate within the utilisation."""
    # 1e-9 less, so that floating-point errors do not round up a rate that divides evenly.
    needed = max(1, math.ceil(demand.requests_per_s / (rate.requests_per_s * demand.utilisation) - 1e-9))
    if demand.zones == 1:
        return Replicas(needed=needed, planned=needed + demand.spare, lost=demand.spare)
    # Replicas are spread evenly over z zones. The remaining z - 1 zones must contain all needed replicas.
    a_zone = max(math.ceil(needed / (demand.zones - 1)), math.ceil((needed + demand.spare) / demand.zones))
    return Replicas(needed=needed, planned=demand.zones * a_zone, lost=a_zone)


def read_load_result(path: Path) -> ServiceRate:
    """Read the highest rate that `antiphon load --search --json` found. Raises CapacityError, which names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CapacityError(f"--load-result {path} cannot be read: {error}") from None
    rate = found.get("highest_rate") if isinstance(found, dict) else None
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
        raise CapacityError(
            f"--load-result {path} has no highest_rate above 0; write it with: "
            "antiphon load --search --objective-p99-ms 250 --duration 30 --json FILE"
        )
    return ServiceRate(requests_per_s=float(rate), origin=f"{path.name}: highest rate with {_objective(found)}")


def _objective(found: dict[str, Any]) -> str:
    """Describe the objective of a search in words."""
    runs = found.get("runs")
    objective = runs[0].get("objective") if isinstance(runs, list) and runs and isinstance(runs[0], dict) else None
    if not isinstance(objective, dict):
        return "an unknown objective"
    names = {"ttft_s": "first token", "e2e_s": "whole answer"}
    bounds = [
        f"p99 of the {name} <= {1e3 * value:g} ms" for key, name in names.items() if (value := objective.get(key))
    ]
    return " and ".join(bounds) or "fewer than 1 % failed"
