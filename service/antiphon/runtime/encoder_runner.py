"""Runner of the native graphs of an encoder-only model: its encoder output, and the heads that read it.

Has no caches, no rows and no blocks. Does not know requests and text; `readout.py` uses the outputs. One thread calls
it.

Axes: K states read, M model width, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.ops.workspace import Workspace
from antiphon.runtime.model_limits import EncodingModel
from antiphon.runtime.native_encoder import NativeEncoder
from antiphon.runtime.runner import EncodeReport


class EncoderRunner(EncodingModel):
    """The encoder graph and the heads of one bundle.

    max_rows: maximum number of sources in a step. threads, workspace_limit_bytes: as in NativeRunner.
    Raises GraphError, BundleError (no native graphs of this precision) or WorkspaceError.
    """

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
        super().__init__(model, graphs, max_rows)
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
