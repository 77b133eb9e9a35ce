"""Runners of the cuda graphs of a bundle: the engine's interface to an NVIDIA GPU.

`native.py` is the same for the processor. Owns the pool's memory on the device. One thread calls a runner, after its
constructor, which may run in another.

Axes: K states read, M model width, O outputs of a head, Op outputs rounded up to 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.manifest import Bundle, Precision
from antiphon.errors import CudaError, GraphError
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_of_longest, cuda_pool_axes
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.workspace import Workspace
from antiphon.runtime.cuda.cuda_graph import CudaGraph, bytes_of, element_of
from antiphon.runtime.cuda.decoder import Bounds, CudaDecoder, Pool
from antiphon.runtime.cuda.encoder import CudaEncoder, read_floats
from antiphon.runtime.runner import DecodeBatch, EncodeReport, PartialRunner, Samples, facts_of, head_widths

# Of the memory that is free once the weights are loaded; the rest is for workspace.
_POOL_SHARE = 0.8


class CudaRunner(PartialRunner):
    """The encoder and decoder graphs of one bundle, or a decoder-only model, over one pool of cache blocks on a device.

    device: with loaded kernels. num_blocks: size of the pool; None is enough for max_rows of the longest sequences, as
    far as the device has memory for them. memory_limit_bytes: maximum memory of ONNX Runtime for each graph, weights
    and workspace together. captures, goes_ahead: False to measure steps without CUDA graphs, or without steps ahead.
    Raises GraphError, BundleError (no cuda graphs of this precision) or CudaError.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: CudaDevice,
        *,
        max_rows: int,
        precision: Precision | None = None,
        num_blocks: int | None = None,
        memory_limit_bytes: int | None = None,
        captures: bool = True,
        goes_ahead: bool = True,
    ) -> None:
        model, graphs = bundle.manifest.model, bundle.graph_set(precision, "cuda")
        self._device = device
        device.use()  # this may be another thread than the one that runs steps
        self.workspace = Workspace(is_own=True)  # of the processor, which computes nothing
        opened = {
            part: CudaGraph(
                bundle.file(name),
                part,
                device,
                captures=captures and part == "decoder",
                memory_limit_bytes=memory_limit_bytes,
            )
            for part, name in (("encoder", graphs.encoder), ("decoder", graphs.decoder))
            if name is not None
        }
        axes = cuda_pool_axes(model)
        self._block_bytes = int(np.prod(axes)) * bytes_of(graphs.precision)
        longest = blocks_of_longest(model)
        num_blocks = num_blocks or self._blocks_that_fit(max_rows * longest, longest)
        cache_bytes_per_token = self._block_bytes // BLOCK_SIZE
        self.facts = facts_of(
            model, graphs, max_rows=max_rows, num_blocks=num_blocks, cache_bytes_per_token=cache_bytes_per_token
        )
        self._memory = device.allocate(num_blocks * self._block_bytes)
        pool = Pool(address=self._memory.address, shape=(num_blocks, *axes), element=element_of(graphs.precision))
        has_encoder = self.facts.has_encoder
        bounds = Bounds(
            max_rows=max_rows,
            num_blocks=num_blocks,
            vocab_size=model.vocab_size,
            max_target_len=model.max_target_len,
            target_block_size=self.facts.target_block_size,
            max_source_len=model.max_source_len if has_encoder else 0,
            has_encoder=has_encoder,
        )
        self._decoder = CudaDecoder(opened["decoder"], device, pool, bounds, goes_ahead=goes_ahead)
        self._encoder = CudaEncoder(opened["encoder"], device, model, graphs.precision, pool) if has_encoder else None

    @property
    def num_ahead(self) -> int:
        """Return the number of steps whose results were there before they were asked for."""
        return self._decoder.num_ahead

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode packed sources of any lengths; source i fills the blocks block_tables[i].

        type_ids have no effect here. Raises ValueError if a source does not fit, GraphError if the device fails.
        """
        if self._encoder is None:
            raise ValueError("a decoder-only model encodes nothing")
        try:
            self._device.use()
            return self._encoder.run(sources, block_tables=block_tables, keep_memory=keep_memory)
        except CudaError as error:
            raise GraphError(f"the encoder failed on the GPU: {error}") from error

    def decode(self, batch: DecodeBatch) -> Samples:
        """Feed every row its new tokens and sample its next one; arrays are valid until the next pass.

        Raises ValueError if the batch does not fit, GraphError if the device fails.
        """
        try:
            self._device.use()
            return self._decoder.run(batch)
        except CudaError as error:
            raise GraphError(f"the decoder failed on the GPU: {error}") from error

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy blocks of the pool. Raises ValueError for a block outside it."""
        for block in (*sources.tolist(), *targets.tolist()):
            if not 0 <= block < self.facts.num_blocks:
                raise ValueError(f"block {block} is not of this pool of {self.facts.num_blocks}")
        self._device.use()
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            start, size = self._memory.address, self._block_bytes
            self._device.copy_within(start + target * size, start + source * size, size)

    def _blocks_that_fit(self, most: int, fewest: int) -> int:
        """Return the number of blocks that the device has memory for, at most `most`. Raises GraphError."""
        free_bytes = self._device.description().free_bytes
        fitting = int(_POOL_SHARE * free_bytes) // self._block_bytes
        if fitting < fewest:
            raise GraphError(
                f"the GPU has {free_bytes} bytes left for cache blocks; the longest sequence needs"
                f" {fewest} of {self._block_bytes} bytes and room for workspace"
            )
        return min(most, fitting)


class CudaEncoderRunner(PartialRunner):
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
        self.facts = facts_of(model, graphs, max_rows=max_rows)
        self._precision, self._widths = graphs.precision, head_widths(model)
        self._device = device
        device.use()  # this may be another thread than the one that runs steps
        self.workspace = Workspace(is_own=True)  # of the processor, which computes nothing

        def opened(name: str, part: str) -> CudaGraph:
            return CudaGraph(bundle.file(name), part, device, captures=False, memory_limit_bytes=memory_limit_bytes)

        encoder = opened(graphs.encoder_file, "encoder")
        self._encoder = CudaEncoder(encoder, device, model, graphs.precision, pool=None)
        self._head_graphs = {task: opened(graphs.heads[task], f"{task} head") for task in self.facts.heads}

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
        elements = as_elements(states, self._precision)
        pinned = self._device.allocate_pinned(elements.nbytes)
        pinned.array[: elements.nbytes] = elements.view(np.uint8).ravel()
        hidden = self._device.allocate(elements.nbytes)
        outputs = self._device.allocate(len(states) * padded * bytes_of(self._precision))
        self._device.copy_in(hidden.address, pinned.address, elements.nbytes)
        bound, element = graph.bind(), element_of(self._precision)
        bound.bind_input("hidden", element, states.shape, hidden.address)
        bound.bind_output("outputs", element, (len(states), padded), outputs.address)
        graph.run(bound)
        return read_floats(self._device, outputs.address, (len(states), padded), self._precision)


def as_elements(values: NDArray[np.float32], precision: Precision) -> NDArray[np.generic]:
    """Return values in the element type of a precision; bfloat16 as its 16 bits, rounded to the nearest, ties to even.

    Values are finite.
    """
    if precision != "bfloat16":
        return np.ascontiguousarray(values, np.float16 if precision == "float16" else np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
