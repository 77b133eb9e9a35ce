"""Runs the graphs of a bundle: batches in, logits out, caches in place.

Owns the key and value arrays of every row, and the buffers bound to them. Refuses to know
requests, text, blocks or sampling. One thread calls it: the arrays of a step are reused by the next.

Axes: B rows of this step, S source length, H heads, D head width, C self cache capacity, E cross cache capacity,
V vocabulary.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.bundle import Bundle, GraphSet, Lowering, MemoryFit, Precision
from antiphon.model.config import ModelConfig
from antiphon.model.graph import Graph, GraphError
from antiphon.model.ops.workspace import Workspace
from antiphon.service.runner import EncodeReport


class ModelRunner:
    """The encoder and decoder graphs of one bundle, with caches for `max_rows` sequences.

    threads counts the cores one run may use. workspace_limit_bytes bounds what ONNX Runtime may hold beside weights;
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
        lowering: Lowering = "contrib",
        workspace_limit_bytes: int | None = None,
    ) -> None:
        model = bundle.manifest.model
        graphs = bundle.graph_set(precision, lowering)
        self.max_rows = max_rows
        self.vocab_size = model.vocab_size
        self.max_source_len = model.max_source_len
        self.max_target_len = model.max_target_len
        self.bos_id = model.bos_id
        self.eos_id = model.eos_id
        self.precision = graphs.precision
        self.cache_bytes_per_token = 2 * model.decoder_layers * model.attention_width * 4
        self._num_heads = model.num_heads
        self._fit = _fit_of(bundle, graphs)
        self._workspace = Workspace()
        self.self_kv = _reserve(model, max_rows, model.max_target_len)
        self.cross_kv = _reserve(model, max_rows, model.max_source_len)
        self._cross_outputs = _cross_names("present", model.decoder_layers)
        self._encoder = Graph(bundle.file(graphs.encoder), "encoder", threads, self._workspace)
        self._encoder.require(["input_ids"], self._cross_outputs)
        decoder = Graph(bundle.file(graphs.decoder), "decoder", threads, self._workspace)
        self._decoder = DecoderStep(decoder, self.self_kv, self.cross_kv, model.vocab_size)
        self._workspace.trim()  # what loading worked in
        self._workspace.limit_growth(workspace_limit_bytes)

    def encode(self, sources: Sequence[Sequence[int]], first_row: int) -> EncodeReport:
        """Encode sources of one length; their cross keys and values land in rows first_row and following.

        Raises ValueError when lengths differ or rows do not fit, GraphError when the graph fails.
        """
        rows, length = len(sources), len(sources[0]) if sources else 0
        input_ids = self._checked_sources(sources, rows, length, first_row)
        self._workspace.reset_peak()
        before = self._workspace.stats().in_use_bytes
        outputs = self._encoder.run({"input_ids": input_ids}, self._cross_outputs)
        peak = self._workspace.stats().peak_bytes - before
        for layer, output in enumerate(outputs):
            self.cross_kv[layer, first_row : first_row + rows, :, :length] = output
        return EncodeReport(
            rows=rows,
            length=length,
            peak_workspace_bytes=peak,
            predicted_fused_bytes=self._fit.predict(rows, length) if self._fit else None,
            predicted_materialised_bytes=rows * self._num_heads * length * length * 4,
        )

    def decode(
        self, token_ids: NDArray[np.int64], past_lens: NDArray[np.int32], source_lens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Feed one token to each of rows 0 to B-1; its key and value are appended at past_lens[b].

        token_ids, past_lens, source_lens: [B], tokens. Returns logits [B, V], a view valid until the next decode.
        Raises ValueError when a length lies outside its cache, GraphError when the graph fails.
        """
        return self._decoder.run(token_ids, past_lens, source_lens)

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        """Copy the live part of a row's caches over another row: self_len and source_len tokens."""
        self.self_kv[:, target, :, :self_len] = self.self_kv[:, source, :, :self_len]
        self.cross_kv[:, target, :, :source_len] = self.cross_kv[:, source, :, :source_len]

    def warm_up(self) -> None:
        """Run both graphs once on row 0, so that no request pays for a first time.

        Overwrites the row's caches: call it before any sequence runs.
        """
        self.encode([[self.eos_id]], 0)
        self.decode(np.array([self.bos_id], np.int64), np.array([0], np.int32), np.array([1], np.int32))

    def _checked_sources(
        self, sources: Sequence[Sequence[int]], rows: int, length: int, first_row: int
    ) -> NDArray[np.int64]:
        if not 0 < length <= self.max_source_len:
            raise ValueError(f"source length is {length}; it must be 1 to {self.max_source_len}")
        if first_row < 0 or first_row + rows > self.max_rows:
            raise ValueError(f"rows {first_row} to {first_row + rows - 1} do not fit max_rows={self.max_rows}")
        if any(len(source) != length for source in sources):
            raise ValueError(f"sources of one run must have one length; got {sorted({len(s) for s in sources})}")
        return np.array(sources, np.int64)


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
        """One step over rows 0 to B-1; see ModelRunner.decode."""
        rows = token_ids.shape[0]
        # The graph writes through raw pointers: nothing out of range may reach it.
        if not 0 < rows <= self._max_rows:
            raise ValueError(f"decode of {rows} rows; it must be 1 to {self._max_rows}")
        if past_lens.min() < 0 or past_lens.max() >= self._capacities[0]:
            raise ValueError(f"past_lens is {past_lens.tolist()}; each must be 0 to {self._capacities[0] - 1}")
        if source_lens.min() < 1 or source_lens.max() > self._capacities[1]:
            raise ValueError(f"source_lens is {source_lens.tolist()}; each must be 1 to {self._capacities[1]}")
        self._token_ids[:rows, 0] = token_ids
        self._past_lens[:rows] = past_lens
        self._source_lens[:rows] = source_lens
        binding = self._bindings.get(rows)
        if binding is None:
            binding = self._bindings[rows] = self._graph.bind(self._inputs, self._outputs, rows)
        self._graph.run_bound(binding)
        return self._logits[:rows]


def _fit_of(bundle: Bundle, graphs: GraphSet) -> MemoryFit | None:
    memory = bundle.manifest.memory
    return memory.fits.get(f"{graphs.lowering}-{graphs.precision}") if memory else None


def _self_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.decoder.{part}" for layer in range(layers) for part in ("key", "value")]


def _cross_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.encoder.{part}" for layer in range(layers) for part in ("key", "value")]


def _reserve(model: ModelConfig, max_rows: int, capacity: int) -> NDArray[np.float32]:
    """Key and value arrays [2 L, rows, H, capacity, D], resident only where written."""
    shape = (2 * model.decoder_layers, max_rows, model.num_heads, capacity, model.resolved_head_dim)
    num_bytes = 4 * math.prod(shape)
    # Not np.zeros: it asks for huge pages, and one token would make two megabytes resident.
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise GraphError(f"caches for {max_rows} rows need {num_bytes} bytes of address space: {error}") from error
    return np.frombuffer(pages, np.float32).reshape(shape)
