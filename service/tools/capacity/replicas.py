"""How many replicas a rate needs, from what one replica was measured to sustain. Pure arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CapacityError(Exception):
    """Capacity cannot be planned as asked; the message names the flag or file, and what it must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceRate:
    """Requests a second that one replica sustains, and how that is known."""

    requests_per_s: float
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requests a second in all, and what of them must survive what.

    utilisation: share of a replica's sustained rate that is planned with. spare: replicas that may be lost at once;
    zones: over so many replicas are spread, and one of them may be lost with all of its replicas; 1 plans for none.
    clients: processes that call, each connected to every replica. call_bytes: of a call on the wire, both ways.
    """

    requests_per_s: float
    utilisation: float
    spare: int
    zones: int
    clients: int
    call_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """How many to run (planned), how many of them may be lost at once, and how many carry the rate (needed)."""

    needed: int
    planned: int
    lost: int


def replicas_for(demand: Demand, rate: ServiceRate) -> Replicas:
    """Replicas to run so that those which are left after a loss still carry the rate within the utilisation."""
    # A hair less, so that a rate which divides evenly is not rounded up by floating point.
    needed = max(1, math.ceil(demand.requests_per_s / (rate.requests_per_s * demand.utilisation) - 1e-9))
    if demand.zones == 1:
        return Replicas(needed=needed, planned=needed + demand.spare, lost=demand.spare)
    # Spread evenly over z zones, the z - 1 that are left must hold all that are needed.
    a_zone = max(math.ceil(needed / (demand.zones - 1)), math.ceil((needed + demand.spare) / demand.zones))
    return Replicas(needed=needed, planned=demand.zones * a_zone, lost=a_zone)


def read_load_result(path: Path) -> ServiceRate:
    """The highest rate that `antiphon load --search --json` found. Raises CapacityError naming the file."""
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
    """In words, what the rates of a search had to meet."""
    runs = found.get("runs")
    objective = runs[0].get("objective") if isinstance(runs, list) and runs and isinstance(runs[0], dict) else None
    if not isinstance(objective, dict):
        return "an objective it does not tell"
    names = {"ttft_s": "first token", "e2e_s": "whole answer"}
    bounds = [
        f"p99 of the {name} <= {1e3 * value:g} ms" for key, name in names.items() if (value := objective.get(key))
    ]
    return " and ".join(bounds) or "fewer than 1 % failed"
