"""Forward passes of the native encoder graph: sources packed without padding, in parts that fit the cores' caches.

Makes the graph's inputs from sources, and measures each pass. The arithmetic of packed sources serves encoders on any
device.

Axes: B sources, N their tokens together, M model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import MemoryFit
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.workspace import Workspace
from antiphon.runtime.runner import EncodeReport

# Activations of more tokens do not fit the cores' caches: 25 us per token at 512, 35 at 2,048 (base model, 2 cores).
RUN_TOKENS = 768

Arrays = dict[str, NDArray[Any]]


class NativeEncoder:
    """The encoder graph, which writes cross caches into blocks of `cache`. cache: None for an encoder-only model.

    Raises GraphError if the inputs or outputs of the graph differ from those that GraphSet describes.
    """

    def __init__(
        self, graph: Graph, model: ModelConfig, workspace: Workspace, fit: MemoryFit | None, cache: NDArray[Any] | None
    ) -> None:
        self._graph = graph
        self._workspace = workspace
        self._fit = fit
        self._cache = cache
        self._model = model
        self._table_width = blocks_for(model.max_source_len, BLOCK_SIZE)
        own = ["block_tables", "cache"] if cache is not None else ["type_ids"] if model.token_types else []
        written = ["written"] if cache is not None else []
        graph.require(["input_ids", "positions", "offsets", *own], [*written, "memory"])

    def run(
        self,
        sources: Sequence[Sequence[int]],
        *,
        block_tables: Sequence[Sequence[int]] = (),
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool,
    ) -> EncodeReport:
        """Encode sources of any lengths. If there is a cache, source i fills the blocks block_tables[i].

        type_ids: token types of each source; empty if all are 0. Raises ValueError if a source does not fit its
        table or its types, GraphError if the graph fails.
        """
        lengths = checked_lengths(sources, self._model.max_source_len)
        if self._cache is not None:
            check_table_lens(block_tables, lengths)
        num_tokens = int(lengths.sum())
        memory = np.empty((num_tokens, self._model.d_model), np.float32) if keep_memory or self._cache is None else None
        peaks, largest, first = [], 0, 0
        for part in parts_of(lengths.tolist(), RUN_TOKENS):
            end = first + int(lengths[part].sum())
            inputs = self._packed(sources[part], lengths[part])
            if self._cache is not None:
                inputs |= {"block_tables": tables_of(block_tables[part], self._table_width), "cache": self._cache}
            elif self._model.token_types:
                inputs["type_ids"] = types_of(type_ids[part], lengths[part])
            peaks.append(self._measured(inputs, None if memory is None else memory[first:end]))
            largest, first = max(largest, end - first), end
        return EncodeReport(
            rows=len(sources),
            num_tokens=num_tokens,
            longest=int(lengths.max()),
            peak_workspace_bytes=max(peaks),
            predicted_fused_bytes=self._fit.predict(1, largest) if self._fit else None,
            predicted_materialised_bytes=self._model.num_heads * 4 * int(np.square(lengths).sum()),
            memory=memory,
        )

    def _packed(self, sources: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> Arrays:
        return {
            "input_ids": np.fromiter(chain.from_iterable(sources), np.int64, int(lengths.sum())),
            "positions": positions_of(lengths),
            "offsets": offsets_of(lengths),
        }

    def _measured(self, inputs: Arrays, memory: NDArray[np.float32] | None) -> int:
        """Run the graph once, with its output in `memory` if given. Return the peak workspace in bytes."""
        outputs: Arrays = {} if self._cache is None else {"written": np.zeros(1, np.int32)}
        if memory is not None:
            outputs["memory"] = memory
        before = self._workspace.reset_peak().in_use_bytes
        self._graph.run_bound(self._graph.bind(inputs, outputs))
        return self._workspace.stats().peak_bytes - before


def checked_lengths(sources: Sequence[Sequence[int]], longest: int) -> NDArray[np.int64]:
    """Return the lengths [B]. Raises ValueError unless each is 1 to `longest`."""
    lengths = np.array([len(source) for source in sources], np.int64)
    if not len(lengths) or lengths.min() < 1 or lengths.max() > longest:
        raise ValueError(f"source lengths are {lengths.tolist()}; each must be 1 to {longest}")
    return lengths


def check_table_lens(block_tables: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> None:
    """Raise ValueError unless each source has as many blocks as its tokens fill."""
    table_lens = [len(table) for table in block_tables]
    if table_lens != (-(-lengths // BLOCK_SIZE)).tolist():
        raise ValueError(f"sources of {lengths.tolist()} tokens cannot fill tables of {table_lens} blocks")


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return [B + 1]: source b holds the tokens offsets[b] to offsets[b + 1] - 1."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_of(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return [N]: the position of each token in its source."""
    offsets = offsets_of(lengths)
    positions: NDArray[np.int32] = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    return positions


def tables_of(block_tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Return the blocks of each source as [B, width]; entries beyond a source's blocks are 0."""
    tables = np.zeros((len(block_tables), width), np.int32)
    for row, blocks in enumerate(block_tables):
        tables[row, : len(blocks)] = blocks
    return tables


def types_of(type_ids: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token types [N]; 0 for sources without types."""
    types = np.zeros(int(lengths.sum()), np.int64)
    first = 0
    for length, source_types in zip(lengths.tolist(), type_ids, strict=False):
        if source_types:
            types[first : first + length] = source_types
        first += length
    return types


def parts_of(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Return the neighbouring sources of each forward pass: at most max_tokens tokens together, or one source."""
    parts, first, num_tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if num_tokens and num_tokens + length > max_tokens:
            parts.append(slice(first, index))
            first, num_tokens = index, 0
        num_tokens += length
    return [*parts, slice(first, len(lengths))]
