"""Contrib and eager graphs, run step by step in plain ONNX Runtime.

For verification and tests. The caller owns rows and caches; there is no scheduling, and speed is not a goal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.graph_ports import Port, decoder_inputs
from antiphon.bundle.manifest import GraphSet
from antiphon.bundle.onnx_runtime import ort
from antiphon.bundle.session import plain_session

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Lens = NDArray[np.int32]


class GraphStepper:
    """Encoder and decoder of a graph set, with a pool of `threads` threads in each session."""

    def __init__(self, directory: Path, graphs: GraphSet, config: ModelConfig, *, threads: int = 1) -> None:
        self._config = config
        self._lowering = graphs.lowering
        self._encoder = plain_session(directory / graphs.encoder_file, threads)
        self._decoder = plain_session(directory / graphs.decoder_file, threads)

    def start(self, sources: Sequence[Ids], capacity: int) -> Callable[[Ids, Lens], Floats]:
        """Encode sources and return a function for steps of one token a row.

        The function maps ids [B] int64 and positions [B] int32 to logits [B, V] float32.
        """
        source_lens = np.array([len(source) for source in sources], np.int32)
        cross_kv = self.fill_cross(sources, int(source_lens.max()) + 2)
        self_kv = self.caches("decoder", len(sources), capacity)
        return lambda ids, positions: self.step(ids, positions, source_lens, self_kv, cross_kv)

    def encode(self, ids: Ids) -> dict[str, Floats]:
        """Return the encoder's outputs by name, each [B, H, S, D] float32, for ids [B, S] int64 without padding."""
        names = [output.name for output in self._encoder.get_outputs()]
        return dict(zip(names, self._encoder.run(names, {"input_ids": ids}), strict=True))

    def fill_cross(self, sources: Sequence[Ids], capacity: int) -> dict[str, Floats]:
        """Return cross caches [B, H, capacity, D] of sources of any lengths; equal lengths are encoded together."""
        caches = self.caches("encoder", len(sources), capacity)
        lens = [len(source) for source in sources]
        for length in sorted(set(lens)):
            rows = [row for row, row_len in enumerate(lens) if row_len == length]
            for name, output in self.encode(np.stack([sources[row] for row in rows])).items():
                caches[name.replace("present", "past_key_values")][rows, :, :length] = output
        return caches

    def caches(self, side: str, rows: int, capacity: int) -> dict[str, Floats]:
        """Return unwritten caches [B, H, capacity, D] of large random numbers; values beyond a row must not matter."""
        random = np.random.default_rng(0)
        sizes = {"batch": rows, "source_capacity": capacity, "target_capacity": capacity}
        ports = self._cache_ports(side)
        return {port.name: 50 * random.standard_normal(port.shape(sizes), np.float32) for port in ports}

    def step(
        self, ids: Ids, past_lens: Lens, source_lens: Lens, self_kv: dict[str, Floats], cross_kv: dict[str, Floats]
    ) -> Floats:
        """Run one token a row, ids [B]: return logits [B, V] and write the new keys and values into self_kv."""
        inputs = {"input_ids": ids[:, None], "past_lens": past_lens, "source_lens": source_lens, **self_kv, **cross_kv}
        logits = np.empty((len(ids), self._config.vocab_size), np.float32)
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        binding = self._decoder.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self_kv:
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), values[name])
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        self._decoder.run_with_iobinding(binding)
        return logits

    def _cache_ports(self, side: str) -> list[Port]:
        return [port for port in decoder_inputs(self._config, self._lowering) if f".{side}." in port.name]
