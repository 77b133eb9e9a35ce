"""Sizing from a bundle, limits and an optional rate: resources and settings of a replica, and number of replicas."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.domain.limits import EngineLimits
from antiphon.errors import BundleError
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, blocks_of_longest, target_block_size
from antiphon.server.models.memory import need_of
from antiphon.server.workers.division import cores_per_worker, suggested_workers
from antiphon.tools.capacity.flags import CapacityError
from antiphon.tools.capacity.footprint import MIB, Footprint, footprint_of

SIZED_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens")
"""Limits on which the memory of a replica depends, beside its cache; each is a flag of `antiphon size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceRate:
    """Requests per second that one replica sustains, and the origin of this figure."""

    requests_per_s: float
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Total requests per second, and the failures that must not reduce the rate."""

    requests_per_s: float
    utilisation: float
    """Planned share of the rate that a replica sustains."""
    spare: int
    """Number of replicas that can fail at once."""
    zones: int
    """Number of zones; one zone can fail with all of its replicas. 1: no zone can fail."""
    clients: int
    """Client processes, each connected to every replica."""
    call_bytes: int
    """Bytes of a call in both directions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Number of replicas."""

    needed: int
    """For the rate, without a failure."""
    planned: int
    """To run."""
    lost: int
    """That can fail at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens that few sources and targets exceed. None is the maximum of the model."""

    source: int | None
    target: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Replica to size. Each worker's cache has room for max_num_seqs rows of these lengths."""

    cores: int
    workers: int | Literal["auto"]
    """"auto" is a number by the cores and the size of the model."""
    limits: EngineLimits
    lengths: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """Result of `antiphon size`."""

    bundle: Bundle
    workers: int
    limits: EngineLimits
    """Limits of each worker."""
    footprint: Footprint
    blocks_formula: str
    cores: int
    demand: Demand | None
    rate: ServiceRate | None
    replicas: Replicas | None
    """None without a rate."""

    @property
    def memory(self) -> str:
        """Return request and limit of memory, in the notation of Kubernetes."""
        return f"{self.footprint.limit_bytes // MIB}Mi"

    @property
    def settings(self) -> dict[str, int]:
        """Return the settings of the server for which the figures are valid."""
        names = SIZED_LIMITS if self.limits.kv_cache_blocks is None else (*SIZED_LIMITS, "kv_cache_blocks")
        threads = max(1, self.cores // self.workers)
        return {"workers": self.workers, "threads": threads, **{name: getattr(self.limits, name) for name in names}}

    @property
    def cores_per_worker(self) -> int:
        """Number of cores that one worker is given for a model of this size."""
        return cores_per_worker(self.footprint.weight_bytes)


def open_profiled(path: Path) -> Bundle:
    """Load a bundle. Raises CapacityError if it has no memory profile, which every model with an encoder needs."""
    try:
        bundle = load_bundle(path)
        graphs = bundle.graph_set()
    except BundleError as error:
        raise CapacityError(str(error)) from None
    if bundle.memory_fit(graphs) is None and bundle.manifest.model.architecture != "decoder":
        raise CapacityError(
            f"{path} has no memory profile of its {graphs.precision} graphs; measure it with: antiphon profile {path}"
        )
    return bundle


def blocks_of(model: ModelConfig, num_rows: int, lengths: Lengths) -> tuple[int | None, str]:
    """Return the number of cache blocks for num_rows rows of these lengths, and its formula.

    The number is at least that of one sequence of maximum length. None without a decoder.
    """
    if not model.decoder_layers:
        return None, "no decoder, no cache"
    longest_source, longest_target = model.longest_cached
    source = min(lengths.source or longest_source, longest_source)
    target = min(lengths.target + 1 if lengths.target else longest_target, longest_target)  # the begin token
    block_size = target_block_size(model)
    a_row = blocks_for(source) + blocks_for(target, block_size)
    formula = f"{num_rows} rows x (ceil({source} / {BLOCK_SIZE}) + ceil({target} / {block_size}))"
    fewest = blocks_of_longest(model)
    if num_rows * a_row < fewest:
        return fewest, f"{formula}, but at least {fewest}, one longest sequence"
    return num_rows * a_row, formula


def size(bundle: Bundle, replica: Replica, demand: Demand | None, rate: ServiceRate | None) -> Sizing:
    """Size a replica and, if there is a demand, the number of replicas."""
    blocks, formula = blocks_of(bundle.manifest.model, replica.limits.max_num_seqs, replica.lengths)
    sized = replace(replica.limits, kv_cache_blocks=blocks)
    need = need_of(bundle, bundle.graph_set(), sized)
    workers = replica.workers
    if workers == "auto":
        workers = suggested_workers(need.memory.weight_bytes, replica.cores)
    return Sizing(
        bundle=bundle,
        workers=workers,
        limits=sized,
        footprint=footprint_of(bundle, bundle.graph_set(), sized, workers),
        blocks_formula=formula,
        cores=replica.cores,
        demand=demand,
        rate=rate,
        replicas=replicas_for(demand, rate) if demand is not None and rate is not None else None,
    )


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
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CapacityError(f"--load-result {path} cannot be read: {error}") from None
    rate = result.get("highest_rate") if isinstance(result, dict) else None
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
        raise CapacityError(
            f"--load-result {path} has no highest_rate above 0; write it with: "
            "antiphon load --search --objective-p99-ms 250 --duration 30 --json FILE"
        )
    return ServiceRate(requests_per_s=float(rate), origin=f"{path.name}: highest rate with {_objective(result)}")


def _objective(result: dict[str, Any]) -> str:
    """Describe the objective of a search in words."""
    runs = result.get("runs")
    objective = runs[0].get("objective") if isinstance(runs, list) and runs and isinstance(runs[0], dict) else None
    if not isinstance(objective, dict):
        return "an unknown objective"
    names = {"ttft_s": "first token", "e2e_s": "whole answer"}
    bounds = [
        f"p99 of the {name} <= {1e3 * value:g} ms" for key, name in names.items() if (value := objective.get(key))
    ]
    return " and ".join(bounds) or "fewer than 1 % failed"
