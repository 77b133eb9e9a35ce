"""Runners of the native graphs of a bundle: packed batches, caches in blocks of one pool, sampling inside the graph.

Owns the pool's memory; the engine decides the use of blocks. Only one thread may call a runner, because each step
reuses the arrays of the previous one. A step of a known shape binds no arrays.

Axes: N tokens of this step, R rows, K samples or states read, E edits, k candidates, X and Y widths of the self and
cross tables, M model width, O outputs of a head.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.bundle.graph import Graph
from antiphon.bundle.manifest import Bundle, GraphSet, Precision
from antiphon.errors import GraphError
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, blocks_of_longest, pool_axes, target_block_size
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, SamplingArrays
from antiphon.ops.workspace import Workspace
from antiphon.runtime.encoder import NativeEncoder
from antiphon.runtime.runner import DecodeBatch, EncodeReport, PartialRunner, Samples, facts_of, head_widths

_FED = ("input_ids", "positions", "offsets", "self_tables", "cross_tables", "source_lens")
_TOPS: dict[str, type[np.generic]] = {"top_ids": np.int64, "top_logprobs": np.float32, "top_scores": np.float32}
_FIRST_NUM_EDITS = 256

Arrays = dict[str, NDArray[Any]]


class NativeRunner(PartialRunner):
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
        if cache is None:
            longest = blocks_of_longest(model)
            cache = _reserve_pool(model, graphs, num_blocks or max_rows * longest)
        self.cache = cache
        cache_bytes_per_token = cache[0].nbytes // BLOCK_SIZE
        self.facts = facts_of(
            model, graphs, max_rows=max_rows, num_blocks=len(cache), cache_bytes_per_token=cache_bytes_per_token
        )
        self.workspace = Workspace(is_own=True, threads=threads)
        self._encoder: NativeEncoder | None = None
        if self.facts.has_encoder:
            encoder = Graph(bundle.file(graphs.encoder_file), "encoder", self.workspace)
            self._encoder = NativeEncoder(encoder, model, self.workspace, bundle.memory_fit(graphs), self.cache)
        decoder = Graph(bundle.file(graphs.decoder_file), "decoder", self.workspace)
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
            if not 0 <= block < len(self.cache):  # NumPy would count from the end
                raise ValueError(f"block {block} is not of this pool of {len(self.cache)}")
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.cache[target] = self.cache[source]


def _reserve_pool(model: ModelConfig, graphs: GraphSet, num_blocks: int) -> NDArray[Any]:
    """Return the pool's memory, as GraphSet describes it."""
    shape = (num_blocks, *pool_axes(model))
    # The engine takes blocks from one end of the pool, and reuses a block that was just freed first.
    return reserve(shape, np.dtype(graphs.cache or "float32"), f"{num_blocks} cache blocks")


class EncoderRunner(PartialRunner):
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
        self.facts = facts_of(model, graphs, max_rows=max_rows)
        self._widths = head_widths(model)
        self.workspace = Workspace(is_own=True, threads=threads)
        encoder = Graph(bundle.file(graphs.encoder_file), "encoder", self.workspace)
        self._encoder = NativeEncoder(encoder, model, self.workspace, bundle.memory_fit(graphs), cache=None)
        self._head_graphs = {
            task: Graph(bundle.file(graphs.heads[task]), f"{task} head", self.workspace) for task in self.facts.heads
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


class NativeDecoder:
    """The decoder graph. Steps in which every row feeds and samples one token are bound once for each shape.

    A shape is a number of rows and of candidates, and whether edits have values. Edits have separate arrays that only
    grow, so that a step with edits needs no other binding.
    """

    def __init__(self, graph: Graph, cache: NDArray[Any], model: ModelConfig, max_rows: int) -> None:
        self._graph = graph
        self._cache = cache
        self._max_rows = max_rows
        self._input_ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int32)
        self._one_each = np.arange(max_rows + 1, dtype=np.int32)
        self._self_tables = _tables(max_rows, model.max_target_len, target_block_size(model))
        self._cross_tables = _tables(max_rows, max(1, model.longest_cached[0]))  # a table has at least one column
        self._source_lens = np.zeros(max_rows, np.int32)
        self._params: Arrays = {
            "picks": np.zeros(max_rows, np.int32),
            "float_params": np.zeros((max_rows, len(FLOAT_PARAMS)), np.float32),
            "int_params": np.zeros((max_rows, len(INT_PARAMS)), np.int64),
        }
        self._edit_offsets = np.zeros(max_rows + 1, np.int32)
        self._edit_ids = np.zeros(_FIRST_NUM_EDITS, np.int32)
        self._edit_values = np.zeros((_FIRST_NUM_EDITS, 3), np.float32)
        self._are_neutral = False  # the edits have no values
        self._chosen: Arrays = {"token_ids": np.zeros(max_rows, np.int64), "logprobs": np.zeros(max_rows, np.float32)}
        self._tops = {name: np.zeros(0, kind) for name, kind in _TOPS.items()}
        self._held: SamplingArrays | None = None  # parameters that the bound arrays hold
        self._bound: dict[tuple[int, int, bool], tuple[Any, Samples]] = {}
        inputs = [*_FED, "cache", *self._params, "edit_offsets", "edit_ids", "edit_values"]
        graph.require(inputs, [*self._chosen, *_TOPS])

    def run(self, batch: DecodeBatch) -> Samples:
        """Run one step; see NativeRunner.decode."""
        rows, sampling = batch.num_rows, batch.sampling
        if not 0 < rows <= self._max_rows:
            raise ValueError(f"rows of the batch are {rows}; they must be 1 to {self._max_rows}")
        if batch.num_tokens != rows or len(sampling) != rows:
            return self._run_once(batch)
        if sampling is not self._held:
            self._hold(sampling, rows)
        self._input_ids[:rows] = batch.token_ids
        self._positions[:rows] = batch.positions
        self._self_tables[:rows, : batch.self_tables.shape[1]] = batch.self_tables
        self._cross_tables[:rows, : batch.cross_tables.shape[1]] = batch.cross_tables
        self._source_lens[:rows] = batch.source_lens
        width = batch.max_num_logprobs
        bound = self._bound.get((rows, width, self._are_neutral)) or self._bind(rows, width)
        self._graph.run_bound(bound[0])
        return bound[1]

    def _run_once(self, batch: DecodeBatch) -> Samples:
        """Run a step of a rare shape, whose binding is not kept: rows with a prefix, or targets to be scored."""
        sampling, num_samples = batch.sampling, len(batch.sampling)
        self._held = None
        self._hold_edits(sampling)
        params: Arrays = {name: getattr(sampling, name) for name in self._params}
        fed = (
            batch.token_ids,
            batch.positions,
            batch.offsets,
            batch.self_tables,
            batch.cross_tables,
            batch.source_lens,
        )
        inputs = dict(zip(_FED, fed, strict=True)) | params | {"edit_offsets": sampling.edit_offsets}
        shape = (num_samples, batch.max_num_logprobs)
        samples = Samples(
            np.zeros(num_samples, np.int64),
            np.zeros(num_samples, np.float32),
            *(np.zeros(shape, kind) for kind in _TOPS.values()),
        )
        contiguous = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        self._graph.run_bound(self._binding(contiguous, samples))
        return samples

    def _hold(self, sampling: SamplingArrays, rows: int) -> None:
        """Copy the sampling parameters of the rows; a later batch with the same object needs no copy."""
        self._held = None
        for name, array in self._params.items():
            array[:rows] = getattr(sampling, name)
        self._edit_offsets[: rows + 1] = sampling.edit_offsets
        self._hold_edits(sampling)
        self._held = sampling

    def _hold_edits(self, sampling: SamplingArrays) -> None:
        num_edits = int(sampling.edit_offsets[-1])
        if num_edits > len(self._edit_ids):
            capacity = max(num_edits, 2 * len(self._edit_ids))
            self._bound.clear()
            self._edit_ids = np.zeros(capacity, np.int32)
            self._edit_values = np.zeros((capacity, 3), np.float32)
        self._edit_ids[:num_edits] = sampling.edit_ids[:num_edits]
        self._are_neutral = num_edits > len(sampling.edit_values)
        if not self._are_neutral:
            self._edit_values[:num_edits] = sampling.edit_values[:num_edits]

    def _bind(self, rows: int, width: int) -> tuple[Any, Samples]:
        """Bind the arrays for this number of rows and candidates, and keep the binding."""
        if rows * width > len(self._tops["top_ids"]):
            self._bound.clear()
            self._tops = {name: np.zeros(self._max_rows * width, kind) for name, kind in _TOPS.items()}
        tops = [array[: rows * width].reshape(rows, width) for array in self._tops.values()]
        samples = Samples(self._chosen["token_ids"][:rows], self._chosen["logprobs"][:rows], *tops)
        inputs: Arrays = {
            "input_ids": self._input_ids[:rows],
            "positions": self._positions[:rows],
            "offsets": self._one_each[: rows + 1],
            "self_tables": self._self_tables[:rows],
            "cross_tables": self._cross_tables[:rows],
            "source_lens": self._source_lens[:rows],
            "edit_offsets": self._edit_offsets[: rows + 1],
        }
        params = {name: array[:rows] for name, array in self._params.items()}
        bound = self._bound[rows, width, self._are_neutral] = (self._binding(inputs | params, samples), samples)
        return bound

    def _binding(self, inputs: Arrays, samples: Samples) -> Any:
        """Return a binding of these inputs, the cache and the edits; with candidates only where there are any."""
        values = self._edit_values[:0] if self._are_neutral else self._edit_values
        shared = {"cache": self._cache, "edit_ids": self._edit_ids, "edit_values": values}
        names = [*self._chosen, *(_TOPS if samples.top_ids.shape[1] else ())]
        return self._graph.bind({**inputs, **shared}, {name: getattr(samples, name) for name in names})


def _tables(max_rows: int, max_len: int, block_size: int = BLOCK_SIZE) -> NDArray[np.int32]:
    return np.zeros((max_rows, blocks_for(max_len, block_size)), np.int32)


def reserve(shape: Sequence[int], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """Return an array of zeros of which only written pages are resident. Raises GraphError, which contains `what`.

    Keep used entries together: then pages of two megabytes waste little memory and need fewer address translations.
    """
    num_bytes = dtype.itemsize * math.prod(shape)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise GraphError(f"{what} need {num_bytes} bytes of address space: {error}") from error
    with suppress(OSError):  # without huge pages serving works too, a little slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def free(reserved: NDArray[Any]) -> None:
    """Return the pages of a reserved array to the system: its entries are zero again. Frees no other array."""
    owner: Any = reserved
    while isinstance(owner, np.ndarray):
        owner = owner.base
    pages = owner.obj if isinstance(owner, memoryview) else owner
    if isinstance(pages, mmap.mmap):
        pages.madvise(mmap.MADV_DONTNEED)
