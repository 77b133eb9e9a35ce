"""Forward passes of the native encoder graph: sources packed without padding, in parts that fit the cores' caches.

Makes the graph's inputs from sources, and measures each pass. Does not know requests and the owners of blocks.

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
from antiphon.runtime.packed_sources import (
    check_table_lens,
    checked_lengths,
    offsets_of,
    parts_of,
    positions_of,
    tables_of,
    types_of,
)
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
