"""Number of workers of a server, and the cores of each."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.bundle.manifest import load_bundle
from antiphon.errors import BundleError
from antiphon.server.machine import usable_cores
from antiphon.server.models.loading import StartupError
from antiphon.server.models.memory import need_of
from antiphon.server.settings import ConfigError, ServerConfig

# Bytes of weights that keep one core as busy as the Python of one worker keeps another: docs/SCALING.md.
BYTES_PER_CORE = 32 << 20
_TOPOLOGY = Path("/sys/devices/system/cpu")


class Role(enum.StrEnum):
    """Part of a server that a process is."""

    BOTH = "both"
    """Answers calls with engines of its own."""
    ENGINE = "engine"
    """Has the engines, and no port."""
    FRONT = "front"
    """Answers calls with the engines of another process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Share of one worker."""

    role: Role = Role.BOTH

    cores: tuple[int, ...]
    """Numbers of its cores; empty if it is not bound to any."""
    threads: int
    """Threads of each model."""


def divide(config: ServerConfig) -> tuple[Division, ...]:
    """Return the share of each worker: whole cores that no other has. Raises ConfigError or, for "auto", StartupError.

    A container may have fewer cores in time than in number; its workers are not bound. Nor are fronts, whose work and
    that of the engine depend on the requests: the engine comes first.
    """
    num_cores = usable_cores()
    if config.fronts:
        threads = config.threads if "threads" in config.model_fields_set else max(1, num_cores - config.fronts)
        engine = Division(role=Role.ENGINE, cores=(), threads=threads)
        return (engine, *(Division(role=Role.FRONT, cores=(), threads=1) for _ in range(config.fronts)))
    count = num_workers(config, num_cores)
    if count > num_cores:
        raise ConfigError(f"workers is {count}; it must be at most {num_cores}, the number of usable cores")
    cores = neighbours_first(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    is_bound = len(cores) == num_cores
    sizes = [num_cores // count + (index < num_cores % count) for index in range(count)]
    ends = [sum(sizes[: index + 1]) for index in range(count)]
    return tuple(
        Division(
            cores=tuple(cores[end - size : end]) if is_bound else (),
            threads=config.threads if "threads" in config.model_fields_set else size,
        )
        for size, end in zip(sizes, ends, strict=True)
    )


def num_workers(config: ServerConfig, num_cores: int) -> int:
    """Return the number of workers: as set, or for "auto" as many as the models' weights and the device suggest."""
    if config.workers != "auto":
        return config.workers
    if config.device != "cpu":
        return 1  # a GPU is served by one process
    return suggested_workers(_weight_bytes(config), num_cores)


def suggested_workers(weight_bytes: int, num_cores: int) -> int:
    """Return the number of workers for models of this size."""
    return max(1, num_cores // cores_per_worker(weight_bytes))


def cores_per_worker(weight_bytes: int) -> int:
    """Return the number of cores that one worker uses well: the larger the model, the more of them."""
    return max(1, round(weight_bytes / BYTES_PER_CORE))


def neighbours_first(cores: Iterable[int], topology: Path = _TOPOLOGY) -> list[int]:
    """Return the cores in an order in which hardware threads of one core, and cores of one package, are neighbours."""

    def position(core: int) -> tuple[int, int, int]:
        package, number = (
            _number(topology / f"cpu{core}" / "topology" / name) for name in ("physical_package_id", "core_id")
        )
        return package, number, core

    return sorted(cores, key=position)


def _weight_bytes(config: ServerConfig) -> int:
    """Return the bytes of the largest model's weights."""
    sizes: Sequence[int] = []
    try:
        for plan in config.plans:
            bundle = load_bundle(plan.path)
            sizes = [*sizes, need_of(bundle, bundle.graph_set(plan.precision), plan.limits).memory.weight_bytes]
    except BundleError as error:
        raise StartupError(str(error)) from error
    return max(sizes)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
