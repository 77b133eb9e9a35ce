"""Runs the native graphs of a bundle: tokens packed, caches in blocks of one pool, sampling inside the graph.

Owns the pool's memory and the arrays bound to the graphs; who uses which block is the engine's business. Refuses to
know requests and text. One thread calls it: the arrays of a step are reused by the next.

Axes: N tokens of this run, R rows, B sources, X and Y widths of the self and cross tables, P block size, H heads,
D head width, Dp = D rounded up to 16, L decoder layers.
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
from antiphon.model.ops.workspace import Workspace
from antiphon.service.kv_cache import CACHE_BLOCK_SIZE, blocks_for, blocks_of_longest
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
        self._fit = bundle.memory_fit(graphs)
        self._workspace = Workspace()
        self._encoder = Graph(bundle.file(graphs.encoder), "encoder", threads, self._workspace)
        self._encoder.require(_ENCODER_INPUTS, ["written"])
        self._cross_width = blocks_for(model.max_source_len, CACHE_BLOCK_SIZE)
        decoder = Graph(bundle.file(graphs.decoder), "decoder", threads, self._workspace)
        self._decoder = NativeDecoder(decoder, self.cache, model, max_rows)
        self._workspace.trim()  # what loading worked in
        self._workspace.limit_growth(workspace_limit_bytes)

    def encode(
        self, sources: Sequence[Sequence[int]], first_row: int, block_tables: Sequence[Sequence[int]]
    ) -> EncodeReport:
        """Encode sources of any lengths, packed; source i fills the blocks block_tables[i].

        first_row means nothing here. Raises ValueError when a source does not fit its table, GraphError when the
        graph fails.
        """
        lengths = self._checked_lengths(sources, block_tables)
        peaks, largest = [], 0
        for part in _parts(lengths.tolist()):
            peaks.append(self._encode_part(sources[part], lengths[part], block_tables[part]))
            largest = max(largest, int(lengths[part].sum()))
        return EncodeReport(
            rows=len(sources),
            num_tokens=int(lengths.sum()),
            longest=int(lengths.max()),
            peak_workspace_bytes=max(peaks),
            predicted_fused_bytes=self._fit.predict(1, largest) if self._fit else None,
            predicted_materialised_bytes=self._num_heads * 4 * int(np.square(lengths).sum()),
        )

    def _encode_part(
        self, sources: Sequence[Sequence[int]], lengths: NDArray[np.int64], block_tables: Sequence[Sequence[int]]
    ) -> int:
        """One run of the graph; returns its peak workspace in bytes."""
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
        self._workspace.reset_peak()
        before = self._workspace.stats().in_use_bytes
        self._encoder.run_bound(self._encoder.bind(inputs, {"written": np.zeros(1, np.int32)}))
        return self._workspace.stats().peak_bytes - before

    def decode(self, batch: DecodeBatch) -> Draw:
        """Feed every row its new tokens and choose its next one, in one run; arrays are valid until the next.

        Raises ValueError when the batch does not fit, GraphError when the graph fails: the operators check every
        position and block.
        """
        return self._decoder.run(batch)

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        """Nothing to do: a row's cache is where its block tables say."""

    def warm_up(self) -> None:
        """Run both graphs once in blocks 0 and 1, so that no request pays for a first time.

        Overwrites them: call it before any sequence runs.
        """
        self.encode([[self.eos_id]], 0, [[0]])
        first, one = np.array([0, 1], np.int32), np.array([1], np.int32)
        self.decode(
            DecodeBatch(
                token_ids=np.array([self.bos_id], np.int64),
                positions=first[:1],
                offsets=first,
                self_tables=one[None],
                cross_tables=first[None, :1],
                source_lens=one,
                temperatures=np.zeros(1, np.float32),
                top_ks=first[:1],
                top_ps=np.ones(1, np.float32),
                seeds=np.zeros(1, np.uint64),
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


class NativeDecoder:
    """The decoder graph with arrays of its own, bound once for each number of rows that feed one token each."""

    def __init__(self, graph: Graph, cache: NDArray[Any], model: ModelConfig, max_rows: int) -> None:
        self._graph = graph
        self._max_rows = max_rows
        widths = [blocks_for(length, CACHE_BLOCK_SIZE) for length in (model.max_target_len, model.max_source_len)]
        self._tokens: dict[str, NDArray[Any]] = {
            "input_ids": np.zeros(max_rows, np.int64),
            "positions": np.zeros(max_rows, np.int32),
        }
        self._offsets = np.zeros(max_rows + 1, np.int32)
        self._rows: dict[str, NDArray[Any]] = {
            "self_tables": np.zeros((max_rows, widths[0]), np.int32),
            "cross_tables": np.zeros((max_rows, widths[1]), np.int32),
            "source_lens": np.zeros(max_rows, np.int32),
            "temperatures": np.zeros(max_rows, np.float32),
            "top_ks": np.zeros(max_rows, np.int32),
            "top_ps": np.zeros(max_rows, np.float32),
            "seeds": np.zeros(max_rows, np.int64),
        }
        self._shared = {"cache": cache, "num_logprobs": np.full(1, -1, np.int32)}
        self._drawn: dict[str, NDArray[Any]] = {
            "token_ids": np.zeros(max_rows, np.int64),
            "logprobs": np.zeros(max_rows, np.float32),
        }
        self._no_tops = (np.zeros((max_rows, 0), np.int64), np.zeros((max_rows, 0), np.float32))
        self._bindings: dict[int, Any] = {}
        inputs = [*self._tokens, "offsets", *self._rows, *self._shared]
        graph.require(inputs, [*self._drawn, "top_ids", "top_logprobs"])

    def run(self, batch: DecodeBatch) -> Draw:
        """One step; see NativeRunner.decode."""
        rows = batch.num_rows
        if not 0 < rows <= self._max_rows:
            raise ValueError(f"decode of {rows} rows; it must be 1 to {self._max_rows}")
        self._fill(batch, rows)
        if batch.num_tokens != rows or batch.num_logprobs > 0:
            return self._run_once(batch, rows)
        self._tokens["input_ids"][:rows] = batch.token_ids
        self._tokens["positions"][:rows] = batch.positions
        binding = self._bindings.get(rows)
        if binding is None:
            inputs = self._inputs({name: array[:rows] for name, array in self._tokens.items()}, rows)
            binding = self._bindings[rows] = self._graph.bind(inputs, self._outputs(rows))
        self._graph.run_bound(binding)
        no_ids, no_logprobs = self._no_tops
        return Draw(self._drawn["token_ids"][:rows], self._drawn["logprobs"][:rows], no_ids[:rows], no_logprobs[:rows])

    def _run_once(self, batch: DecodeBatch, rows: int) -> Draw:
        """A step of a shape that is not worth remembering: prefixes beside other rows' tokens, or likeliest tokens."""
        tokens: dict[str, NDArray[Any]] = {
            "input_ids": np.ascontiguousarray(batch.token_ids),
            "positions": np.ascontiguousarray(batch.positions),
        }
        count = max(batch.num_logprobs, 0)
        tops = (np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float32))
        outputs = self._outputs(rows)
        if count:
            outputs |= zip(("top_ids", "top_logprobs"), tops, strict=True)
        self._graph.run_bound(self._graph.bind(self._inputs(tokens, rows), outputs))
        return Draw(self._drawn["token_ids"][:rows], self._drawn["logprobs"][:rows], *tops)

    def _fill(self, batch: DecodeBatch, rows: int) -> None:
        held = self._rows
        self._offsets[: rows + 1] = batch.offsets
        for name, tables in (("self_tables", batch.self_tables), ("cross_tables", batch.cross_tables)):
            held[name][:rows, : tables.shape[1]] = tables
        held["source_lens"][:rows] = batch.source_lens
        held["temperatures"][:rows] = batch.temperatures
        held["top_ks"][:rows] = batch.top_ks
        held["top_ps"][:rows] = batch.top_ps
        held["seeds"][:rows] = batch.seeds.view(np.int64)
        self._shared["num_logprobs"][0] = batch.num_logprobs

    def _inputs(self, tokens: dict[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
        held = {name: array[:rows] for name, array in self._rows.items()}
        return {**tokens, "offsets": self._offsets[: rows + 1], **held, **self._shared}

    def _outputs(self, rows: int) -> dict[str, NDArray[Any]]:
        return {name: array[:rows] for name, array in self._drawn.items()}


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
