"""Memory of a GPU that a bundle needs: weights and cache blocks; the workspace of its runs is not known beforehand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.bundle.manifest import BundleError, load_bundle
from antiphon.server.models.memory import block_bytes_of, weight_bytes
from antiphon.tools.capacity.flags import CapacityError
from antiphon.tools.capacity.sizing import Lengths, blocks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of one replica's card."""

    model: str
    precision: str
    weight_bytes: int
    cache_blocks: int
    """0 without a decoder."""
    block_bytes: int
    formula: str
    """Of the number of blocks."""

    @property
    def total_bytes(self) -> int:
        """Bytes of weights and cache."""
        return self.weight_bytes + self.cache_blocks * self.block_bytes


def device_memory_of(path: Path, max_num_seqs: int, lengths: Lengths) -> DeviceMemory:
    """Return what the cuda graphs of a bundle need. Raises CapacityError if it has none."""
    try:
        bundle = load_bundle(path)
        graphs = bundle.graph_set(lowering="cuda")
    except BundleError as error:
        raise CapacityError(str(error)) from None
    model = bundle.manifest.model
    blocks, formula = blocks_of(model, max_num_seqs, lengths)
    return DeviceMemory(
        model=bundle.manifest.name,
        precision=graphs.precision,
        weight_bytes=weight_bytes(bundle, graphs),
        cache_blocks=blocks or 0,
        block_bytes=block_bytes_of(model, graphs) if blocks else 0,
        formula=formula,
    )


def as_text(memory: DeviceMemory) -> str:
    """Return a text with the formula of every number."""
    cache = f"{memory.cache_blocks} blocks of {memory.block_bytes} bytes: {memory.formula}"
    return "\n".join(
        [
            f"{memory.model}, {memory.precision}: memory of one replica's GPU",
            f"  weights    {memory.weight_bytes:>15,} bytes",
            f"  cache      {memory.cache_blocks * memory.block_bytes:>15,} bytes  {cache}",
            f"  together   {memory.total_bytes:>15,} bytes, and workspace, for which the server leaves a fifth",
        ]
    )


def as_json(memory: DeviceMemory) -> dict[str, Any]:
    """Return the same as plain data."""
    return {**asdict(memory), "total_bytes": memory.total_bytes}
