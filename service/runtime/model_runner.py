"""Runs the contrib graphs of a bundle: a row's caches are contiguous, and NumPy chooses the tokens.

Owns the key and value arrays of every row, and the buffers bound to them; cache blocks are numbers to it, of which it
has enough. Refuses to know requests and text. One thread calls it: the arrays of a step are reused by the next.

Axes: B rows of this run, K choices, S source length, H heads, D head width, C self cache capacity, E cross cache
capacity, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle.graph import Graph
from antiphon.model.bundle.manifest import Bundle, Lowering, Precision
from antiphon.model.config import ModelConfig
from antiphon.model.head_config import HeadConfig
from antiphon.model.head_config import Task as HeadTask
from antiphon.model.ops.cache_geometry import BLOCK_SIZE, blocks_of_longest
from antiphon.model.ops.choices import choose
from antiphon.model.ops.workspace import Workspace
from antiphon.service.runtime.reserve import reserve
from antiphon.service.runtime.runner import DecodeBatch, Draw, EncodeReport


class ModelRunner:
    """The encoder and decoder graphs of one bundle, with caches for `max_rows` sequences.

    threads counts the cores one run may use. num_blocks bounds what runs together; None is as much as the caches hold.
    workspace_limit_bytes bounds what ONNX Runtime may hold beside weights; a run that needs more raises GraphError and
    leaves the runner usable.
    Raises GraphError, BundleError (no such precision) or WorkspaceError.
    """

    has_encoder = True
    has_decoder = True
    can_share_blocks = False
    can_resume = False
    can_embed = False
    heads: Mapping[HeadTask, HeadConfig] = MappingProxyType({})

    def __init__(
        self,
        bundle: Bundle,
        *,
        max_rows: int,
        threads: int,
        precision: Precision | None = None,
        lowering: Lowering = "contrib",
        num_blocks: int | None = None,
        workspace_limit_bytes: int | None = None,
    ) -> None:
        model = bundle.manifest.model
        graphs = bundle.graph_set(precision, lowering)
        self.max_rows = max_rows
        self.vocab_size = model.vocab_size
        self.source_vocab_size = model.resolved_source_vocab_size
        self.max_source_len = model.max_source_len
        self.max_target_len = model.max_target_len
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.precision = graphs.precision
        self.block_size = BLOCK_SIZE
        longest = blocks_of_longest(*model.longest_cached, BLOCK_SIZE)
        self.num_blocks = num_blocks or max_rows * longest
        self.cache_bytes_per_token = 2 * model.decoder_layers * model.attention_width * 4
        self._num_heads = model.num_heads
        self._fit = bundle.memory_fit(graphs)
        self.workspace = Workspace(is_own=True)
        self.self_kv = _reserve(model, max_rows, model.max_target_len)
        self.cross_kv = _reserve(model, max_rows, model.max_source_len)
        self._cross_outputs = _cross_names("present", model.decoder_layers)
        self._encoder = Graph(bundle.file(graphs.encoder_file), "encoder", threads, self.workspace)
        self._encoder.require(["input_ids"], self._cross_outputs)
        decoder = Graph(bundle.file(graphs.decoder_file), "decoder", threads, self.workspace)
        self._decoder = DecoderStep(decoder, self.self_kv, self.cross_kv, model.vocab_size)
        self.workspace.trim()  # what loading worked in
        self.workspace.limit_growth(workspace_limit_bytes)

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        first_row: int,
        block_tables: Sequence[Sequence[int]] = (),
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        """Encode sources, those of one length in one run; their keys and values land in rows first_row and following.

        block_tables and type_ids mean nothing here. Raises ValueError when a source or the rows do not fit, or the
        encoder's states are wanted, which these graphs do not give; GraphError when a graph fails.
        """
        if keep_memory:
            raise ValueError("the encoder's states are wanted; this lowering's graphs do not give them")
        self._check_sources(sources, first_row)
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        groups = [list(group) for _, group in groupby(order, key=lambda index: len(sources[index]))]
        peaks = [self._encode_group([sources[i] for i in group], [first_row + i for i in group]) for group in groups]
        shapes = [(len(group), len(sources[group[0]])) for group in groups]
        predictions = [self._fit.predict(rows, length) for rows, length in shapes] if self._fit else [None]
        return EncodeReport(
            rows=len(sources),
            num_tokens=sum(rows * length for rows, length in shapes),
            longest=shapes[-1][1],
            peak_workspace_bytes=max(peaks),
            predicted_fused_bytes=max(p for p in predictions if p is not None) if self._fit else None,
            predicted_materialised_bytes=sum(rows * self._num_heads * length**2 * 4 for rows, length in shapes),
        )

    def decode(self, batch: DecodeBatch) -> Draw:
        """Feed every row its new tokens, one a run of the graph, and make the choices.

        Raises ValueError when a length lies outside its cache, GraphError when the graph fails.
        """
        return choose(self.logits(batch), batch.choices, batch.positions[batch.choices.picks])

    def logits(self, batch: DecodeBatch) -> NDArray[np.float32]:
        """Logits [K, V] after each picked token, perhaps a view, valid until the next call. Raises as decode does."""
        first, last, picks = batch.offsets[:-1], batch.offsets[1:] - 1, batch.choices.picks
        if batch.num_tokens == batch.num_rows:
            logits = self._decoder.run(batch.token_ids, batch.positions, batch.source_lens)
            return logits if np.array_equal(picks, first) else logits[picks]
        rows = np.searchsorted(batch.offsets, picks, side="right") - 1
        result = np.empty((len(picks), self.vocab_size), np.float32)
        for step in range(int((last - first).max()) + 1):
            # A row without a further token feeds its last one again, which writes the same key and value.
            fed = np.minimum(first + step, last)
            logits = self._decoder.run(batch.token_ids[fed], batch.positions[fed], batch.source_lens)
            is_picked = picks == first[rows] + step
            result[is_picked] = logits[rows[is_picked]]
        return result

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Never asked: rows share no blocks."""
        raise NotImplementedError("blocks are numbers only to this runner: its rows share none")

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Never asked: only encoders alone have heads."""
        raise NotImplementedError(f"this model has no {task} head")

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        """Copy the live part of a row's caches over another row: self_len and source_len tokens."""
        self.self_kv[:, target, :, :self_len] = self.self_kv[:, source, :, :self_len]
        self.cross_kv[:, target, :, :source_len] = self.cross_kv[:, source, :, :source_len]

    def _encode_group(self, sources: list[Sequence[int]], rows: list[int]) -> int:
        """Encode sources of one length into rows; returns the peak workspace in bytes."""
        before = self.workspace.reset_peak().in_use_bytes
        outputs = self._encoder.run({"input_ids": np.array(sources, np.int64)}, self._cross_outputs)
        peak = self.workspace.stats().peak_bytes - before
        for cache, output in zip(self.cross_kv, outputs, strict=True):
            cache[rows, :, : len(sources[0])] = output
        return peak

    def _check_sources(self, sources: Sequence[Sequence[int]], first_row: int) -> None:
        lengths = [len(source) for source in sources]
        if not lengths or min(lengths) < 1 or max(lengths) > self.max_source_len:
            raise ValueError(f"source lengths are {lengths}; each must be 1 to {self.max_source_len}")
        if first_row < 0 or first_row + len(sources) > self.max_rows:
            last = first_row + len(sources) - 1
            raise ValueError(f"rows {first_row} to {last} do not fit max_rows={self.max_rows}")


class DecoderStep:
    """The decoder graph with everything it touches bound in advance, once for each number of rows.

    self_kv, cross_kv: [2 L, rows, H, capacity, D] float32, keys and values alternating by layer. Row b of the batch
    is row b of the arrays. Past and present of self_kv are bound to the same memory, so the graph appends in place.
    """

    def __init__(
        self, graph: Graph, self_kv: NDArray[np.float32], cross_kv: NDArray[np.float32], vocab_size: int
    ) -> None:
        max_rows = self_kv.shape[1]
        self._graph = graph
        self._max_rows = max_rows
        self._token_ids = np.zeros((max_rows, 1), np.int64)
        self._past_lens = np.zeros(max_rows, np.int32)
        self._source_lens = np.ones(max_rows, np.int32)
        self._logits = np.zeros((max_rows, vocab_size), np.float32)
        layers = self_kv.shape[0] // 2
        self._capacities = (self_kv.shape[3], cross_kv.shape[3])
        self._inputs = {
            "input_ids": self._token_ids,
            "past_lens": self._past_lens,
            "source_lens": self._source_lens,
            **dict(zip(_self_names("past_key_values", layers), self_kv, strict=True)),
            **dict(zip(_cross_names("past_key_values", layers), cross_kv, strict=True)),
        }
        self._outputs = {"logits": self._logits, **dict(zip(_self_names("present", layers), self_kv, strict=True))}
        self._bindings: dict[int, Any] = {}
        graph.require(list(self._inputs), list(self._outputs))

    def run(
        self, token_ids: NDArray[np.int64], past_lens: NDArray[np.int32], source_lens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Feed one token to each of rows 0 to B-1; its key and value are appended at past_lens[b].

        token_ids, past_lens, source_lens: [B]. Returns logits [B, V], a view valid until the next run.
        """
        rows = token_ids.shape[0]
        # The graph writes through raw pointers: nothing out of range may reach it.
        if not 0 < rows <= self._max_rows:
            raise ValueError(f"decode of {rows} rows; it must be 1 to {self._max_rows}")
        if past_lens.min() < 0 or past_lens.max() >= self._capacities[0]:
            raise ValueError(f"positions are {past_lens.tolist()}; each must be 0 to {self._capacities[0] - 1}")
        if source_lens.min() < 1 or source_lens.max() > self._capacities[1]:
            raise ValueError(f"source_lens is {source_lens.tolist()}; each must be 1 to {self._capacities[1]}")
        self._token_ids[:rows, 0] = token_ids
        self._past_lens[:rows] = past_lens
        self._source_lens[:rows] = source_lens
        binding = self._bindings.get(rows)
        if binding is None:
            binding = self._bindings[rows] = self._graph.bind(_head(self._inputs, rows), _head(self._outputs, rows))
        self._graph.run_bound(binding)
        return self._logits[:rows]


def _head(arrays: dict[str, NDArray[Any]], rows: int) -> dict[str, NDArray[Any]]:
    return {name: array[:rows] for name, array in arrays.items()}


def _self_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.decoder.{part}" for layer in range(layers) for part in ("key", "value")]


def _cross_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.encoder.{part}" for layer in range(layers) for part in ("key", "value")]


def _reserve(model: ModelConfig, max_rows: int, capacity: int) -> NDArray[np.float32]:
    """Key and value arrays [2 L, rows, H, capacity, D]."""
    shape = (2 * model.decoder_layers, max_rows, model.num_heads, capacity, model.resolved_head_dim)
    return reserve(shape, np.dtype(np.float32), f"caches for {max_rows} rows")
