"""Sizing from a bundle, limits and an optional rate: resources and settings of a replica, and number of replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, BundleError, load_bundle
from antiphon.domain.limits import EngineLimits
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, blocks_of_longest
from antiphon.server.models.memory import need_of
from antiphon.server.workers.division import cores_per_worker, suggested_workers
from antiphon.tools.capacity.replicas import CapacityError, Demand, Replicas, ServiceRate, replicas_for
from antiphon.tools.capacity.sizing.footprint import MIB, Footprint, footprint_of

SIZED_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens")
"""Limits on which the memory of a replica depends, beside its cache; each is a flag of `antiphon size`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens that few sources and targets exceed. None is the maximum of the model."""

    source: int | None
    target: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Replica to size. Each worker's cache has room for max_num_seqs rows of these lengths.

    workers: "auto" is a number by the cores and the size of the model.
    """

    cores: int
    workers: int | Literal["auto"]
    limits: EngineLimits
    lengths: Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """Result of `antiphon size`. limits: those of each worker. replicas: None if no rate was given."""

    bundle: Bundle
    workers: int
    limits: EngineLimits
    footprint: Footprint
    blocks_formula: str
    cores: int
    demand: Demand | None
    rate: ServiceRate | None
    replicas: Replicas | None

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
    def cores_each(self) -> int:
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
    a_row = blocks_for(source, BLOCK_SIZE) + blocks_for(target, BLOCK_SIZE)
    formula = f"{num_rows} rows x (ceil({source} / {BLOCK_SIZE}) + ceil({target} / {BLOCK_SIZE}))"
    fewest = blocks_of_longest(longest_source, longest_target, BLOCK_SIZE)
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
