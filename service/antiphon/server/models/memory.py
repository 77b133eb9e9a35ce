"""Memory budget: the memory of each model, and a check whether another one fits.

A model counts with all memory that it may use: complete weight files, though some are only mapped; every block of its
cache, though a block is resident only after its first use; and the workspace of its runs.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, GraphSet
from antiphon.domain.errors import OverBudget
from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.ops.cache_geometry import blocks_of_longest, cuda_pool_axes, pool_axes
from antiphon.runtime.cuda.cuda_graph import bytes_of
from antiphon.runtime.encoder import RUN_TOKENS

log = logging.getLogger(__name__)

# For a model without a limit and without a measured profile: four times the need of a base model for 1,024 tokens.
DEFAULT_WORKSPACE_BYTES = 256 << 20
# Bytes of limit per predicted byte: allocations are rounded up to regions, and a fit has a residual. The shipped model
# needs at most 1.2.
LIMIT_MARGIN = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMemory:
    """Bytes of a model in the budget, resident or not."""

    weight_bytes: int
    """Its graphs and their weights."""
    cache_bytes: int
    """Its whole cache."""
    workspace_bytes: int
    """Workspace of its runs."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Memory that a model needs, and the settings that could reduce it."""

    memory: ModelMemory
    num_blocks: int
    """Cache blocks of a worker; 0 without a decoder."""
    block_bytes: int
    """Bytes of one cache block in all workers; 0 without a decoder."""
    fewest_blocks: int
    """Blocks of one longest sequence, below which no cache can be."""


class MemoryBudget:
    """Memory of all models, with a limit; None is no limit. Thread-safe."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self._reserved: dict[str, ModelMemory] = {}
        self._lock = threading.Lock()

    @property
    def reserved(self) -> Mapping[str, ModelMemory]:
        """Memory of each model by name, from before it is loaded until after it is unloaded."""
        with self._lock:
            return dict(self._reserved)

    def reserve(self, name: str, need: Need) -> None:
        """Reserve memory for a model to be loaded. Raises OverBudget, naming each part and the setting to lower."""
        with self._lock:
            if self.limit_bytes is not None:
                free_bytes = self.limit_bytes - sum(memory.total_bytes for memory in self._reserved.values())
                if need.memory.total_bytes > free_bytes:
                    raise OverBudget(_refusal(name, need, free_bytes, self.limit_bytes))
            self._reserved[name] = need.memory

    def release(self, name: str) -> None:
        """Release the memory of a model that is unloaded or could not be loaded."""
        with self._lock:
            self._reserved.pop(name, None)


def check_memory(models: Mapping[str, ModelMemory], available_bytes: int | None) -> None:
    """Warn if the models may use more memory than there is.

    Raises OverBudget if their weights and workspaces alone need more: a cache may stay mostly empty, but these do not.
    """
    if available_bytes is None:
        return
    total_bytes = sum(memory.total_bytes for memory in models.values())
    fixed_bytes = total_bytes - sum(memory.cache_bytes for memory in models.values())
    names = ", ".join(models)
    if fixed_bytes > available_bytes:
        raise OverBudget(
            f"{names}: weights and workspaces need {fixed_bytes} bytes; this machine or container has {available_bytes}"
        )
    if total_bytes > available_bytes:
        log.warning(
            "%s: may use %d bytes, of which %d are cache; this machine or container has %d; "
            "lower kv_cache_blocks or max_num_seqs",
            names,
            total_bytes,
            total_bytes - fixed_bytes,
            available_bytes,
        )


def need_of(
    bundle: Bundle, graphs: GraphSet, limits: EngineLimits, num_lanes: int = 1, *, num_workers: int = 1
) -> Need:
    """Return the memory needed to serve these graphs of a bundle.

    Workers share the weights; each has a cache of its own, and each of its lanes a workspace.
    """
    model = bundle.manifest.model
    fewest = blocks_of_longest(model)
    num_blocks = block_bytes = 0  # of every worker; bytes of all workers
    if graphs.decoder is not None:
        num_blocks = limits.num_cache_blocks(fewest)
        block_bytes = num_workers * block_bytes_of(model, graphs)
    memory = ModelMemory(
        weight_bytes=weight_bytes(bundle, graphs),
        cache_bytes=num_blocks * block_bytes,
        workspace_bytes=num_workers * _workspace_bytes(bundle, graphs, limits, num_lanes),
    )
    return Need(memory=memory, num_blocks=num_blocks, block_bytes=block_bytes, fewest_blocks=fewest)


def block_bytes_of(model: ModelConfig, graphs: GraphSet) -> int:
    """Return the bytes of one cache block, in the memory of the processor or of a GPU."""
    if graphs.lowering == "cuda":
        return math.prod(cuda_pool_axes(model)) * bytes_of(graphs.precision)
    return math.prod(pool_axes(model)) * np.dtype(graphs.cache or "float32").itemsize


def encode_budget(bundle: Bundle, graphs: GraphSet, limits: EngineLimits, num_lanes: int = 1) -> EncodeBudget | None:
    """Return one lane's memory budget of encoding by the bundle's fit; None if nothing was measured."""
    fit = bundle.memory_fit(graphs)
    if fit is None:
        return None

    def predict(num_tokens: int, longest: int) -> float:
        return fit.predict(1, min(num_tokens, max(RUN_TOKENS, longest)))  # packed, in parts

    max_bytes = _workspace_bytes(bundle, graphs, limits, num_lanes) // num_lanes
    if limits.workspace_limit_bytes is not None:
        max_bytes = int(max_bytes / LIMIT_MARGIN)
    return EncodeBudget(max_bytes=max_bytes, predict=predict)


def weight_bytes(bundle: Bundle, graphs: GraphSet) -> int:
    """Return the size of the set's graphs and of all files of the bundle that they name as external data."""
    listed = bundle.manifest.files
    own = {
        name for name in (graphs.encoder, graphs.decoder, graphs.explain, *graphs.heads.values()) if name is not None
    }
    names = {name.encode(): name for name in listed.keys() - own}
    external = {names[text] for name in own for text in _find(bundle.file(name), names)}
    return sum(listed[name].size for name in own | external)


def _find(path: Path, texts: Iterable[bytes]) -> list[bytes]:
    """Return those of the texts that a file of any size contains."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [text for text in texts if content.find(text) >= 0]


def _workspace_bytes(bundle: Bundle, graphs: GraphSet, limits: EngineLimits, num_lanes: int) -> int:
    """Return the limit if there is one, else the prediction of the bundle's profile for the largest encoder runs."""
    if limits.workspace_limit_bytes is not None:
        return limits.workspace_limit_bytes
    fit, longest = bundle.memory_fit(graphs), bundle.manifest.model.max_source_len
    if fit is None:
        return DEFAULT_WORKSPACE_BYTES * num_lanes
    # Packed: only the tokens count.
    return num_lanes * math.ceil(fit.predict(1, max(min(limits.max_num_batched_tokens, RUN_TOKENS), longest)))


def _refusal(name: str, need: Need, free_bytes: int, limit_bytes: int) -> str:
    memory = need.memory
    cache = f"{memory.cache_bytes} of cache (lower {_cache_setting(need, free_bytes)})" if memory.cache_bytes else None
    parts = [
        f"{memory.weight_bytes} bytes of weights",
        cache,
        f"{memory.workspace_bytes} of workspace (lower or set workspace_limit_bytes)",
    ]
    return (
        f"model {name!r} needs {memory.total_bytes} bytes: {', '.join(part for part in parts if part)}; "
        f"{max(0, free_bytes)} of memory_limit_bytes, {limit_bytes}, are free"
    )


def _cache_setting(need: Need, free_bytes: int) -> str:
    """Return the setting that makes the cache smaller, and its value if that alone makes the model fit."""
    room_bytes = free_bytes - (need.memory.total_bytes - need.memory.cache_bytes)
    fitting = max(0, room_bytes // need.block_bytes)
    if fitting >= need.fewest_blocks:
        return f"kv_cache_blocks from {need.num_blocks}: {fitting} would fit"
    return f"kv_cache_blocks from {need.num_blocks}, though {need.fewest_blocks}, the fewest, would not fit either"
