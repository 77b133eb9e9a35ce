"""Runner of the native graphs of an encoder-only model: its encoder output, and the heads that read it.

Has no caches, no rows and no blocks. Does not know requests and text; `readout.py` uses the outputs. One thread calls
it.

Axes: K states read, M model width, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle.graph import Graph
from antiphon.model.bundle.manifest import Bundle, Precision
from antiphon.model.head_config import HeadConfig
from antiphon.model.head_config import Task as HeadTask
from antiphon.model.ops.cache_geometry import BLOCK_SIZE
from antiphon.model.ops.workspace import Workspace
from antiphon.service.runtime.native_encoder import NativeEncoder
from antiphon.service.runtime.runner import DecodeBatch, EncodeReport, Samples


class EncoderRunner:
    """The encoder graph and the heads of one bundle.

    max_rows: maximum number of sources in a step. threads, workspace_limit_bytes: as in NativeRunner.
    Raises GraphError, BundleError (no native graphs of this precision) or WorkspaceError.
    """

    has_encoder = True
    has_decoder = False
    block_size = BLOCK_SIZE
    num_blocks = 0
    cache_bytes_per_token = 0
    max_target_len = 0

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_rows: int,
        threads: int,
        precision: Precision | None = None,
        workspace_limit_bytes: int | None = None,
    ) -> None:
        model, graphs = bundle.manifest.model, bundle.graph_set(precision)
        self.max_rows = max_rows
        self.vocab_size = model.vocab_size
        self.source_vocab_size = model.resolved_source_vocab_size
        self.max_source_len = model.max_source_len
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.precision = graphs.precision
        self.heads: Mapping[HeadTask, HeadConfig] = {head.task: head for head in model.heads}
        self._widths = {head.task: width_of(head, model.vocab_size) for head in model.heads}
        self.workspace = Workspace(is_own=True)
        encoder = Graph(bundle.file(graphs.encoder_file), "encoder", threads, self.workspace)
        self._encoder = NativeEncoder(encoder, model, self.workspace, bundle.memory_fit(graphs), cache=None)
        self._head_graphs = {
            task: Graph(bundle.file(graphs.heads[task]), f"{task} head", threads, self.workspace) for task in self.heads
        }
        for graph in self._head_graphs.values():
            graph.require(["hidden"], ["outputs"])
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
        """Encode packed sources of any lengths and keep their states; block_tables have no effect.

        Raises ValueError if a source is too long, GraphError if the graph fails.
        """
        return self._encoder.run(sources, type_ids=type_ids, keep_memory=True)

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs [K, O] for rows [K, M] of the encoder output. Raises GraphError if the graph fails."""
        graph, outputs = self._head_graphs[task], np.empty((len(states), self._widths[task]), np.float32)
        graph.run_bound(graph.bind({"hidden": states}, {"outputs": outputs}))
        return outputs

    def decode(self, batch: DecodeBatch) -> Samples:
        """Raise NotImplementedError; the engine never calls this without a decoder."""
        raise NotImplementedError("an encoder-only model decodes nothing")

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Raise NotImplementedError; the engine never calls this without blocks."""
        raise NotImplementedError("an encoder-only model has no cache blocks")


def width_of(head: HeadConfig, vocab_size: int) -> int:
    """Return O: one output for each label or token; for pool the width of its transform."""
    if head.task == "fill_mask":
        return vocab_size
    return len(head.labels) if head.labels else head.transform_width or 0
