"""Runs encoder passes on a GPU: sources packed without padding, in parts that do not hold running streams up for long.

A pass is launched and not waited for, unless its states are wanted: steps that read its caches run behind it in the
same stream.

Axes: B sources, N their tokens together, W tiles of queries, M model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Precision
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.cuda import TILE
from antiphon.ops.cuda.driver import CudaDevice, DeviceMemory
from antiphon.runtime.cuda.cuda_graph import CudaGraph, bytes_of, element_of
from antiphon.runtime.cuda.decoder import Pool
from antiphon.runtime.cuda.step_buffers import Layout
from antiphon.runtime.encoder import (
    check_table_lens,
    checked_lengths,
    fill_tables,
    offsets_of,
    parts_of,
    positions_of,
    types_of,
)
from antiphon.runtime.runner import EncodeReport

RUN_TOKENS = 4096
"""Tokens of one pass, unless one source has more. A pass of them takes as long as a few steps of many rows."""

# Distance of the outputs `written.LAYER`: kernels take addresses that are multiples of 16.
_WRITTEN_BYTES = 16

Arrays = dict[str, NDArray[Any]]


class CudaEncoder:
    """The encoder graph of a bundle on a device. pool: blocks for cross caches; None for an encoder-only model."""

    def __init__(
        self, graph: CudaGraph, device: CudaDevice, model: ModelConfig, precision: Precision, pool: Pool | None
    ) -> None:
        self._graph = graph
        self._device = device
        self._model = model
        self._precision = precision
        self._pool = pool
        self._num_written = model.decoder_layers if pool is not None else 0
        self._transfer = _Transfer(device)
        self._states: DeviceMemory | None = None
        self._written = device.allocate(max(1, self._num_written) * _WRITTEN_BYTES)

    def run(
        self,
        sources: Sequence[Sequence[int]],
        *,
        block_tables: Sequence[Sequence[int]] = (),
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool,
    ) -> EncodeReport:
        """Encode sources of any lengths. If there is a pool, source i fills the blocks block_tables[i].

        type_ids: token types of each source; empty if all are 0. Raises ValueError if a token, a type, a length or a
        table is out of its range, GraphError if the graph fails.
        """
        lengths = self._checked(sources, block_tables)
        memory = []
        for part in parts_of(lengths, RUN_TOKENS):
            arrays = self._packed(sources[part], block_tables[part], type_ids[part], lengths[part])
            num_tokens = sum(lengths[part])
            states = self._launch(arrays, num_tokens)
            if keep_memory or self._pool is None:
                memory.append(self._read(states, num_tokens))
        return EncodeReport(
            rows=len(sources),
            num_tokens=sum(lengths),
            longest=max(lengths),
            peak_workspace_bytes=None,
            predicted_fused_bytes=None,
            predicted_materialised_bytes=self._model.num_heads
            * bytes_of(self._precision)
            * sum(length * length for length in lengths),
            memory=np.concatenate(memory) if memory else None,
        )

    def _checked(self, sources: Sequence[Sequence[int]], block_tables: Sequence[Sequence[int]]) -> list[int]:
        lengths = checked_lengths(sources, self._model.max_source_len)
        vocab_size = self._model.resolved_source_vocab_size
        lowest, highest = min(map(min, sources)), max(map(max, sources))
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(f"source tokens are {lowest} to {highest}; they must be 0 to {vocab_size - 1}")
        if self._pool is not None:
            check_table_lens(block_tables, lengths)
            _check_blocks(block_tables, self._pool.shape[0])
        return lengths

    def _packed(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        type_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> Arrays:
        """Return the graph's inputs of one pass."""
        tiles = [(row, first) for row, length in enumerate(lengths) for first in range(0, length, TILE)]
        arrays: Arrays = {
            "tokens": np.fromiter(chain.from_iterable(sources), np.int32, sum(lengths)),
            "positions": positions_of(lengths),
            "offsets": offsets_of(lengths),
            "tiles": np.array(tiles, np.int32),
        }
        if self._pool is not None:
            arrays["rows"] = np.repeat(np.arange(len(sources), dtype=np.int32), lengths)
            arrays["tables"] = np.zeros((len(sources), blocks_for(max(lengths))), np.int32)
            fill_tables(arrays["tables"], block_tables)
        elif self._model.token_types:
            arrays["types"] = _checked_types(type_ids, lengths, self._model.token_types)
        return arrays

    def _launch(self, arrays: Arrays, num_tokens: int) -> DeviceMemory:
        """Launch one pass; return where it writes its states [N, M]."""
        bound = self._graph.bind()
        for name, (address, array) in self._transfer.copy_in(arrays).items():
            bound.bind_input(name, array.dtype.type, array.shape, address)
        element, width = element_of(self._precision), self._model.d_model
        needed = num_tokens * width * bytes_of(self._precision)
        if self._states is None or self._states.num_bytes < needed:
            self._device.wait()  # an earlier pass may still write to the old one
            self._states = self._device.allocate(needed)
        bound.bind_output("memory", element, (num_tokens, width), self._states.address)
        for layer in range(self._num_written):
            bound.bind_output(f"written.{layer}", np.int32, (1,), self._written.address + _WRITTEN_BYTES * layer)
        if self._pool is not None:
            bound.bind_input("cache", self._pool.element, self._pool.shape, self._pool.address)
        self._graph.run(bound)
        return self._states

    def _read(self, states: DeviceMemory, num_tokens: int) -> NDArray[np.float32]:
        """Wait for a pass and return its states as float32."""
        shape = (num_tokens, self._model.d_model)
        return read_floats(self._device, states.address, shape, self._precision)


class _Transfer:
    """Memory through which the inputs of passes reach the device; it grows with them."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pinned = device.allocate_pinned(1)
        self._memory = device.allocate(1)
        self._is_copied = device.event()

    def copy_in(self, arrays: Arrays) -> dict[str, tuple[int, NDArray[Any]]]:
        """Copy arrays to the device behind all work of its stream; return the address of each beside it."""
        layout = Layout({name: (array.dtype.type, array.shape) for name, array in arrays.items()})
        self._is_copied.wait()  # the copy before still reads the pinned memory
        if layout.num_bytes > self._memory.num_bytes:
            self._device.wait()
            self._pinned = self._device.allocate_pinned(2 * layout.num_bytes)
            self._memory = self._device.allocate(2 * layout.num_bytes)
        for name, view in layout.views(self._pinned.array).items():
            view[...] = arrays[name]
        self._device.copy_in(self._memory.address, self._pinned.address, layout.num_bytes)
        self._is_copied.record()
        return {name: (self._memory.address + place.offset, arrays[name]) for name, place in layout}


def read_floats(device: CudaDevice, address: int, shape: tuple[int, ...], precision: Precision) -> NDArray[np.float32]:
    """Wait for all work of the device's stream, and return an array of the graph's element type as float32."""
    size = int(np.prod(shape))
    pinned = device.allocate_pinned(size * bytes_of(precision))
    device.copy_out(pinned.address, address, size * bytes_of(precision))
    device.wait()
    if precision == "bfloat16":  # the upper half of a float32
        bits = pinned.array[: 2 * size].view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    kind = np.float16 if precision == "float16" else np.float32
    return pinned.array[: size * bytes_of(precision)].view(kind).astype(np.float32).reshape(shape)


def _check_blocks(block_tables: Sequence[Sequence[int]], num_blocks: int) -> None:
    for table in block_tables:
        if min(table) < 0 or max(table) >= num_blocks:
            raise ValueError(f"blocks {min(table)} to {max(table)} are not of this pool of {num_blocks}")


def _checked_types(type_ids: Sequence[Sequence[int]], lengths: Sequence[int], num_types: int) -> NDArray[np.int32]:
    """Return the token types of packed sources. Raises ValueError for a type out of range."""
    types = types_of(type_ids, lengths)
    if types.min() < 0 or types.max() >= num_types:
        raise ValueError(f"token types are {types.min()} to {types.max()}; they must be 0 to {num_types - 1}")
    return types.astype(np.int32)
