"""Runner of the native graphs of a bundle: packed batches, caches in blocks of one pool, sampling inside the graph.

Owns the pool's memory; the engine decides the use of blocks. Does not know requests and text. Only one thread may call
it, because each step reuses the arrays of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, GraphSet, Precision
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_of_longest, pool_axes
from antiphon.ops.workspace import Workspace
from antiphon.runtime.model_limits import DecodingModel
from antiphon.runtime.native_decoder import NativeDecoder
from antiphon.runtime.native_encoder import NativeEncoder
from antiphon.runtime.reserve import free, reserve
from antiphon.runtime.runner import DecodeBatch, EncodeReport, Samples


class NativeRunner(DecodingModel):
    """The encoder and decoder graphs of one bundle, or a decoder-only model, over one pool of cache blocks.

    threads: number of cores that one run may use. num_blocks: size of the pool; None is enough for max_rows of the
    longest sequences. A block becomes resident when it is first used. workspace_limit_bytes: maximum memory of ONNX
    Runtime besides weights; a run that needs more raises GraphError, and the runner stays usable.
    Raises GraphError, BundleError (no native graphs of this precision) or WorkspaceError.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_rows: int,
        threads: int,
        precision: Precision | None = None,
        num_blocks: int | None = None,
        workspace_limit_bytes: int | None = None,
        cache: NDArray[Any] | None = None,
    ) -> None:
        model, graphs = bundle.manifest.model, bundle.graph_set(precision)
        super().__init__(model, graphs, max_rows)
        longest = blocks_of_longest(*model.longest_cached, BLOCK_SIZE)
        self.num_blocks = len(cache) if cache is not None else num_blocks or max_rows * longest
        self.cache = cache if cache is not None else _reserve_pool(model, graphs, self.num_blocks)
        self.cache_bytes_per_token = self.cache[0].nbytes // BLOCK_SIZE
        self.workspace = Workspace(is_own=True)
        self._encoder: NativeEncoder | None = None
        if self.has_encoder:
            encoder = Graph(bundle.file(graphs.encoder_file), "encoder", threads, self.workspace)
            self._encoder = NativeEncoder(encoder, model, self.workspace, bundle.memory_fit(graphs), self.cache)
        decoder = Graph(bundle.file(graphs.decoder_file), "decoder", threads, self.workspace)
        self._decoder = NativeDecoder(decoder, self.cache, model, max_rows)
        self.workspace.trim()  # frees memory that loading used
        self.workspace.limit_growth(workspace_limit_bytes)

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode packed sources of any lengths; source i fills the blocks block_tables[i].

        type_ids have no effect here. Raises ValueError if a source does not fit its table, GraphError if the graph
        fails.
        """
        if self._encoder is None:
            raise ValueError("a decoder-only model encodes nothing")
        return self._encoder.run(sources, block_tables=block_tables, keep_memory=keep_memory)

    def decode(self, batch: DecodeBatch) -> Samples:
        """Feed every row its new tokens and sample its next one, in one pass; arrays are valid until the next pass.

        Raises ValueError if the batch does not fit, GraphError if the graph fails: the operators check every
        position and block.
        """
        return self._decoder.run(batch)

    def free_cache(self) -> None:
        """Return the pages of the pool to the system; all blocks are zero then."""
        free(self.cache)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy blocks of the pool. Raises ValueError for a block outside it."""
        for block in (*sources.tolist(), *targets.tolist()):
            if not 0 <= block < self.num_blocks:  # NumPy would count from the end
                raise ValueError(f"block {block} is not of this pool of {self.num_blocks}")
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.cache[target] = self.cache[source]


def _reserve_pool(model: ModelConfig, graphs: GraphSet, num_blocks: int) -> NDArray[Any]:
    """Return the pool's memory, as GraphSet describes it."""
    shape = (num_blocks, *pool_axes(model))
    # The engine takes blocks from one end of the pool, and reuses a block that was just freed first.
    return reserve(shape, np.dtype(graphs.cache or "float32"), f"{num_blocks} cache blocks")
