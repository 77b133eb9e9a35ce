"""Runner of the cuda graphs of an encoder-only model: its encoder output, and the heads that read it.

encoder_runner.py is the same for the processor. Has no caches, no rows and no blocks. One thread calls it.

Axes: K states read, M model width, O outputs of a head, Op outputs rounded up to 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.graph import GraphError
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.ops.cuda.driver import CudaDevice, CudaError
from antiphon.ops.workspace import Workspace
from antiphon.runtime.cuda.cuda_graph import CudaGraph, bytes_of, element_of
from antiphon.runtime.cuda.encoder import CudaEncoder, read_floats
from antiphon.runtime.model_limits import EncodingModel
from antiphon.runtime.runner import EncodeReport


class CudaEncoderRunner(EncodingModel):
    """The encoder graph and the heads of one bundle on a device.

    max_rows: maximum number of sources in a step. device, memory_limit_bytes: as in CudaRunner.
    Raises GraphError, BundleError (no cuda graphs of this precision) or CudaError.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: CudaDevice,
        *,
        max_rows: int,
        precision: Precision | None = None,
        memory_limit_bytes: int | None = None,
    ) -> None:
        model, graphs = bundle.manifest.model, bundle.graph_set(precision, "cuda")
        super().__init__(model, graphs, max_rows)
        self._device = device
        device.use()  # this may be another thread than the one that runs steps
        self.workspace = Workspace(is_own=True)  # of the processor, which computes nothing

        def opened(name: str, part: str) -> CudaGraph:
            return CudaGraph(bundle.file(name), part, device, captures=False, memory_limit_bytes=memory_limit_bytes)

        encoder = opened(graphs.encoder_file, "encoder")
        self._encoder = CudaEncoder(encoder, device, model, self.precision, pool=None)
        self._head_graphs = {task: opened(graphs.heads[task], f"{task} head") for task in self.heads}

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode packed sources of any lengths and keep their states; block_tables have no effect.

        Raises ValueError if a source does not fit, GraphError if the device fails.
        """
        try:
            self._device.use()
            return self._encoder.run(sources, type_ids=type_ids, keep_memory=True)
        except CudaError as error:
            raise GraphError(f"the encoder failed on the GPU: {error}") from error

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs [K, O] for rows [K, M] of the encoder output. Raises GraphError if the device fails."""
        try:
            self._device.use()
            return self._run_head(task, states)[:, : self._widths[task]]
        except CudaError as error:
            raise GraphError(f"the {task} head failed on the GPU: {error}") from error

    def _run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs [K, Op]."""
        graph = self._head_graphs[task]
        padded = -(-self._widths[task] // BLOCK_SIZE) * BLOCK_SIZE
        given = as_elements(states, self.precision)
        pinned = self._device.allocate_pinned(given.nbytes)
        pinned.array[: given.nbytes] = given.view(np.uint8).ravel()
        hidden = self._device.allocate(given.nbytes)
        outputs = self._device.allocate(len(states) * padded * bytes_of(self.precision))
        self._device.copy_in(hidden.address, pinned.address, given.nbytes)
        bound, element = graph.bind(), element_of(self.precision)
        bound.bind_input("hidden", element, states.shape, hidden.address)
        bound.bind_output("outputs", element, (len(states), padded), outputs.address)
        graph.run(bound)
        return read_floats(self._device, outputs.address, (len(states), padded), self.precision)


def as_elements(values: NDArray[np.float32], precision: Precision) -> NDArray[np.generic]:
    """Return values in the element type of a precision; bfloat16 as its 16 bits, rounded to the nearest, ties to even.

    Values are finite.
    """
    if precision != "bfloat16":
        return np.ascontiguousarray(values, np.float16 if precision == "float16" else np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
