"""Runs one step of the native decoder graph: copies a batch to the arrays bound to the graph, and runs the graph.

Owns the bound arrays, so that a step of a known shape binds no arrays. Does not know the meaning of blocks, rows and
sampling parameters; the operators check all of them.

Axes: N tokens of this step, R rows, K samples, E edits, k candidates, X and Y widths of the self and cross tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.graph import Graph
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, Samples, SamplingArrays
from antiphon.runtime.runner import DecodeBatch

_FED = ("input_ids", "positions", "offsets", "self_tables", "cross_tables", "source_lens")
_TOPS: dict[str, type[np.generic]] = {"top_ids": np.int64, "top_logprobs": np.float32, "top_scores": np.float32}
_FIRST_NUM_EDITS = 256

Arrays = dict[str, NDArray[Any]]


class NativeDecoder:
    """The decoder graph. Steps in which every row feeds and samples one token are bound once for each shape.

    A shape is a number of rows and of candidates. Edits have separate arrays that only grow, so that a step with edits
    needs no other binding.
    """

    def __init__(self, graph: Graph, cache: NDArray[Any], model: ModelConfig, max_rows: int) -> None:
        self._graph = graph
        self._cache = cache
        self._max_rows = max_rows
        self._input_ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int32)
        self._one_each = np.arange(max_rows + 1, dtype=np.int32)
        self._self_tables = _tables(max_rows, model.max_target_len)
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
        self._chosen: Arrays = {"token_ids": np.zeros(max_rows, np.int64), "logprobs": np.zeros(max_rows, np.float32)}
        self._tops = {name: np.zeros(0, kind) for name, kind in _TOPS.items()}
        self._held: SamplingArrays | None = None  # parameters that the bound arrays hold
        self._bound: dict[tuple[int, int], tuple[Any, Samples]] = {}
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
        bound = self._bound.get((rows, batch.max_num_logprobs)) or self._bind(rows, batch.max_num_logprobs)
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
        bound = self._bound[rows, width] = (self._binding(inputs | params, samples), samples)
        return bound

    def _binding(self, inputs: Arrays, samples: Samples) -> Any:
        """Return a binding of these inputs, the cache and the edits; with candidates only where there are any."""
        shared = {"cache": self._cache, "edit_ids": self._edit_ids, "edit_values": self._edit_values}
        names = [*self._chosen, *(_TOPS if samples.top_ids.shape[1] else ())]
        return self._graph.bind({**inputs, **shared}, {name: getattr(samples, name) for name in names})


def _tables(max_rows: int, max_len: int) -> NDArray[np.int32]:
    return np.zeros((max_rows, blocks_for(max_len, BLOCK_SIZE)), np.int32)
