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
# Bindings that are kept. Each has about 2 KB.
_MAX_BOUND = 256

Arrays = dict[str, NDArray[Any]]


class NativeEncoder:
    """The encoder graph, which writes cross caches into blocks of `cache`. cache: None for an encoder-only model.

    Bindings of passes that only fill caches are kept by shape: making one takes a quarter as long as the graph does for
    one short source.
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
        most = max(RUN_TOKENS, model.max_source_len)
        self._input_ids = np.zeros(most, np.int64)
        self._positions = np.zeros(most, np.int32)
        self._one_source = np.arange(most, dtype=np.int32)  # its positions
        self._offsets = np.zeros(most + 1, np.int32)
        self._tables = np.zeros((most if cache is not None else 0, self._table_width), np.int32)
        self._written = np.zeros(1, np.int32)
        self._bound: dict[tuple[int, int], Any] = {}  # by sources and tokens

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
        num_tokens = sum(lengths)
        memory = np.empty((num_tokens, self._model.d_model), np.float32) if keep_memory or self._cache is None else None
        peaks, largest, first = [], 0, 0
        for part in parts_of(lengths, RUN_TOKENS):
            end = first + sum(lengths[part])
            inputs = self._packed(sources[part], lengths[part], end - first)
            if self._cache is not None:
                tables = self._tables[: len(sources[part])]
                fill_tables(tables, block_tables[part])
                inputs["block_tables"] = tables
            elif self._model.token_types:
                inputs["type_ids"] = types_of(type_ids[part], lengths[part])
            peaks.append(self._measured(inputs, None if memory is None else memory[first:end]))
            largest, first = max(largest, end - first), end
        return EncodeReport(
            rows=len(sources),
            num_tokens=num_tokens,
            longest=max(lengths),
            peak_workspace_bytes=max(peaks),
            predicted_fused_bytes=self._fit.predict(1, largest) if self._fit else None,
            predicted_materialised_bytes=self._model.num_heads * 4 * sum(length * length for length in lengths),
            memory=memory,
        )

    def _packed(self, sources: Sequence[Sequence[int]], lengths: Sequence[int], num_tokens: int) -> Arrays:
        """Write the inputs of any encoder to the kept arrays, and return their parts in use."""
        self._input_ids[:num_tokens] = sources[0] if len(sources) == 1 else [*chain.from_iterable(sources)]
        self._positions[:num_tokens] = self._one_source[:num_tokens] if len(sources) == 1 else positions_of(lengths)
        np.cumsum(lengths, out=self._offsets[1 : len(sources) + 1])
        return {
            "input_ids": self._input_ids[:num_tokens],
            "positions": self._positions[:num_tokens],
            "offsets": self._offsets[: len(sources) + 1],
        }

    def _measured(self, inputs: Arrays, memory: NDArray[np.float32] | None) -> int:
        """Run the graph once, with its output in `memory` if given. Return the peak workspace in bytes."""
        kept: Arrays = {} if self._cache is None else {"cache": self._cache}
        outputs: Arrays = {} if self._cache is None else {"written": self._written}
        if memory is not None:
            binding = self._graph.bind(inputs | kept, {**outputs, "memory": memory})
        else:
            shape = len(inputs["offsets"]) - 1, len(inputs["input_ids"])
            binding = self._bound.get(shape)
            if binding is None:
                if len(self._bound) == _MAX_BOUND:
                    self._bound.clear()
                binding = self._bound[shape] = self._graph.bind(inputs | kept, outputs)
        before = self._workspace.reset_peak()
        self._graph.run_bound(binding)
        return self._workspace.peak() - before


def checked_lengths(sources: Sequence[Sequence[int]], longest: int) -> list[int]:
    """Return the lengths [B]. Raises ValueError unless each is 1 to `longest`."""
    lengths = [len(source) for source in sources]
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        raise ValueError(f"source lengths are {lengths}; each must be 1 to {longest}")
    return lengths


def check_table_lens(block_tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
    """Raise ValueError unless each source has as many blocks as its tokens fill."""
    table_lens = [len(table) for table in block_tables]
    if table_lens != [-(-length // BLOCK_SIZE) for length in lengths]:
        raise ValueError(f"sources of {lengths} tokens cannot fill tables of {table_lens} blocks")


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return [B + 1]: source b holds the tokens offsets[b] to offsets[b + 1] - 1."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_of(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return [N]: the position of each token in its source."""
    offsets = offsets_of(lengths)
    positions: NDArray[np.int32] = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    return positions


def fill_tables(tables: NDArray[np.int32], block_tables: Sequence[Sequence[int]]) -> None:
    """Write the blocks of each source to [B, width]; entries beyond a source's blocks are 0."""
    tables[:] = 0
    for row, blocks in enumerate(block_tables):
        tables[row, : len(blocks)] = blocks


def types_of(type_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the token types [N]; 0 for sources without types."""
    types = np.zeros(sum(lengths), np.int64)
    first = 0
    for length, source_types in zip(lengths, type_ids, strict=False):
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
