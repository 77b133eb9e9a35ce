"""Runs the native graphs of a bundle: tokens packed, caches in blocks of one pool, sampling inside the graph.

Owns the pool's memory; who uses which block is the engine's business. Refuses to know requests and text. One thread
calls it: the arrays of a step are reused by the next.

Axes: B sources, M model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle import Bundle, GraphSet, Precision
from antiphon.model.config import ModelConfig
from antiphon.model.graph import Graph
from antiphon.model.ops.choices import greedy_choices
from antiphon.model.ops.workspace import Workspace
from antiphon.service.kv_cache import CACHE_BLOCK_SIZE, blocks_for, blocks_of_longest
from antiphon.service.native_decoder import NativeDecoder
from antiphon.service.reserve import reserve
from antiphon.service.runner import DecodeBatch, Draw, EncodeReport

_LANES = 16  # head widths are rounded up to it in the pool
# Activations of more tokens no longer fit near the cores: 25 us a token at 512, 35 at 2,048 (base model, 2 cores).
_RUN_TOKENS = 768
_ENCODER_INPUTS = ["input_ids", "positions", "offsets", "block_tables", "cache"]


class NativeRunner:
    """The encoder and decoder graphs of one bundle over one pool of cache blocks.

    threads counts the cores one run may use. num_blocks is the size of the pool; None is enough for max_rows of the
    longest sequences, resident only where used. workspace_limit_bytes bounds what ONNX Runtime may hold beside weights;
    a run that needs more raises GraphError and leaves the runner usable.
    Raises GraphError, BundleError (no such precision) or WorkspaceError.
    """

    can_share_blocks = True
    can_embed = True

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_rows: int,
        threads: int,
        precision: Precision | None = None,
        num_blocks: int | None = None,
        workspace_limit_bytes: int | None = None,
    ) -> None:
        model, graphs = bundle.manifest.model, bundle.graph_set(precision, "native")
        self.max_rows = max_rows
        self.vocab_size = model.vocab_size
        self.source_vocab_size = model.resolved_source_vocab_size
        self.max_source_len = model.max_source_len
        self.max_target_len = model.max_target_len
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.precision = graphs.precision
        self.block_size = CACHE_BLOCK_SIZE
        longest = blocks_of_longest(model.max_source_len, model.max_target_len, CACHE_BLOCK_SIZE)
        self.num_blocks = num_blocks or max_rows * longest
        self.cache = _reserve_pool(model, graphs, self.num_blocks)
        self.cache_bytes_per_token = self.cache[0].nbytes // CACHE_BLOCK_SIZE
        self._num_heads = model.num_heads
        self._memory_width = model.d_model
        self._fit = bundle.memory_fit(graphs)
        self._workspace = Workspace()
        self._encoder = Graph(bundle.file(graphs.encoder_file), "encoder", threads, self._workspace)
        self._encoder.require(_ENCODER_INPUTS, ["written", "memory"])
        self._cross_width = blocks_for(model.max_source_len, CACHE_BLOCK_SIZE)
        decoder = Graph(bundle.file(graphs.decoder_file), "decoder", threads, self._workspace)
        self._decoder = NativeDecoder(decoder, self.cache, model, max_rows)
        self._workspace.trim()  # what loading worked in
        self._workspace.limit_growth(workspace_limit_bytes)

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        first_row: int,
        block_tables: Sequence[Sequence[int]],
        *,
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode sources of any lengths, packed; source i fills the blocks block_tables[i].

        first_row means nothing here. Raises ValueError when a source does not fit its table, GraphError when the
        graph fails.
        """
        lengths = self._checked_lengths(sources, block_tables)
        num_tokens = int(lengths.sum())
        memory = np.empty((num_tokens, self._memory_width), np.float32) if keep_memory else None
        peaks, largest, first = [], 0, 0
        for part in _parts(lengths.tolist()):
            end = first + int(lengths[part].sum())
            states = None if memory is None else memory[first:end]
            peaks.append(self._encode_part(sources[part], lengths[part], block_tables[part], states))
            largest, first = max(largest, end - first), end
        return EncodeReport(
            rows=len(sources),
            num_tokens=num_tokens,
            longest=int(lengths.max()),
            peak_workspace_bytes=max(peaks),
            predicted_fused_bytes=self._fit.predict(1, largest) if self._fit else None,
            predicted_materialised_bytes=self._num_heads * 4 * int(np.square(lengths).sum()),
            memory=memory,
        )

    def _encode_part(
        self,
        sources: Sequence[Sequence[int]],
        lengths: NDArray[np.int64],
        block_tables: Sequence[Sequence[int]],
        memory: NDArray[np.float32] | None,
    ) -> int:
        """One run of the graph, its states to `memory` where wanted; returns its peak workspace in bytes."""
        offsets = np.zeros(len(sources) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        num_tokens = int(offsets[-1])
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.fromiter(chain.from_iterable(sources), np.int64, num_tokens),
            "positions": np.arange(num_tokens, dtype=np.int32) - np.repeat(offsets[:-1], lengths),
            "offsets": offsets,
            "block_tables": _table_of(block_tables, self._cross_width),
            "cache": self.cache,
        }
        outputs: dict[str, NDArray[Any]] = {"written": np.zeros(1, np.int32)}
        if memory is not None:
            outputs["memory"] = memory
        self._workspace.reset_peak()
        before = self._workspace.stats().in_use_bytes
        self._encoder.run_bound(self._encoder.bind(inputs, outputs))
        return self._workspace.stats().peak_bytes - before

    def decode(self, batch: DecodeBatch) -> Draw:
        """Feed every row its new tokens and choose its next one, in one run; arrays are valid until the next.

        Raises ValueError when the batch does not fit, GraphError when the graph fails: the operators check every
        position and block.
        """
        return self._decoder.run(batch)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy blocks of the pool. Raises ValueError for a block outside it."""
        for block in (*sources.tolist(), *targets.tolist()):
            if not 0 <= block < self.num_blocks:  # NumPy would count from the end
                raise ValueError(f"block {block} is not of this pool of {self.num_blocks}")
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.cache[target] = self.cache[source]

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        """Nothing to do: a row's cache is where its block tables say."""

    def warm_up(self) -> None:
        """Run both graphs once in blocks 0 and 1, so that no request pays for a first time.

        Overwrites them: call it before any sequence runs.
        """
        self.encode([[self.eos_id]], 0, [[0]])
        zeros, ones = np.zeros(1, np.int32), np.ones(1, np.int32)
        self.decode(
            DecodeBatch(
                token_ids=np.array([self.bos_id], np.int64),
                positions=zeros,
                offsets=np.array([0, 1], np.int32),
                self_tables=ones[None],
                cross_tables=zeros[None],
                source_lens=ones,
                choices=greedy_choices(zeros),
            )
        )

    def _checked_lengths(
        self, sources: Sequence[Sequence[int]], block_tables: Sequence[Sequence[int]]
    ) -> NDArray[np.int64]:
        lengths = np.array([len(source) for source in sources], np.int64)
        if not len(lengths) or lengths.min() < 1 or lengths.max() > self.max_source_len:
            raise ValueError(f"source lengths are {lengths.tolist()}; each must be 1 to {self.max_source_len}")
        if [len(table) for table in block_tables] != (-(-lengths // self.block_size)).tolist():
            held = [len(table) for table in block_tables]
            raise ValueError(f"sources of {lengths.tolist()} tokens cannot fill tables of {held} blocks")
        return lengths


def _parts(lengths: Sequence[int]) -> list[slice]:
    """Neighbouring sources that one run encodes: of at most _RUN_TOKENS together, or one alone."""
    parts, first, held = [], 0, 0
    for index, length in enumerate(lengths):
        if held and held + length > _RUN_TOKENS:
            parts.append(slice(first, index))
            first, held = index, 0
        held += length
    return [*parts, slice(first, len(lengths))]


def _table_of(block_tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    table = np.zeros((len(block_tables), width), np.int32)
    for row, blocks in enumerate(block_tables):
        table[row, : len(blocks)] = blocks
    return table


def _reserve_pool(model: ModelConfig, graphs: GraphSet, num_blocks: int) -> NDArray[Any]:
    """The pool, as GraphSet describes it."""
    head_width = -(-model.resolved_head_dim // _LANES) * _LANES
    shape = (num_blocks, model.decoder_layers, 2, model.num_heads, CACHE_BLOCK_SIZE * head_width)
    # Blocks are handed out from one end of the pool, and a block just freed goes first.
    return reserve(shape, np.dtype(graphs.cache or "float32"), f"{num_blocks} cache blocks", is_dense=True)
