"""Greedy decoding of random sources by a runner, timed: the tokens per second that an engine could reach at most."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.sampling import greedy_sampling
from antiphon.runtime.runner import DecodeBatch, Runner


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Rows that decode together, tokens of each source, and tokens that each row decodes."""

    rows: int
    source_len: int
    num_steps: int

    @property
    def num_blocks(self) -> int:
        """Cache blocks of all rows."""
        return self.rows * (blocks_for(self.source_len) + blocks_for(self.num_steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Wall-clock seconds of encoding and of decoding, and CPU seconds of this process while it decoded."""

    encode_s: float
    decode_s: float
    host_s: float


def decode(runner: Runner, load: Load, seed: int = 0) -> tuple[Times, NDArray[np.int64]]:
    """Encode random sources and decode greedily; return the times, and the tokens [steps, rows]."""
    random = np.random.default_rng(seed)
    sources = random.integers(4, runner.facts.source_vocab_size, (load.rows, load.source_len)).tolist()
    blocks = np.arange(load.num_blocks, dtype=np.int32).reshape(load.rows, -1)
    cross, own = np.split(blocks, [blocks_for(load.source_len)], axis=1)
    began_s = time.perf_counter()
    runner.encode(sources, cross.tolist(), keep_memory=False)
    _first(runner, load, own, cross)  # waits for the encoder
    encoded_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = _steps(runner, load, own, cross)
    times = Times(
        encode_s=encoded_s - began_s,
        decode_s=time.perf_counter() - encoded_s,
        host_s=time.process_time() - cpu_s,
    )
    return times, tokens


def _first(runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32]) -> None:
    """Decode the first token of one row, which the timed steps decode again with the same result."""
    runner.decode(_batch(runner, np.full(1, runner.facts.bos_id), 0, own[:1], cross[:1], load.source_len))


def _steps(runner: Runner, load: Load, own: NDArray[np.int32], cross: NDArray[np.int32]) -> NDArray[np.int64]:
    batch = _batch(runner, np.full(load.rows, runner.facts.bos_id), 0, own, cross, load.source_len)
    tokens = np.empty((load.num_steps, load.rows), np.int64)
    for step in range(load.num_steps):
        tokens[step] = runner.decode(batch).token_ids
        batch.token_ids[:] = np.maximum(tokens[step], 0)
        batch.positions[:] += 1
    return tokens


def _batch(
    runner: Runner,
    token_ids: NDArray[np.int64],
    position: int,
    own: NDArray[np.int32],
    cross: NDArray[np.int32],
    source_len: int,
) -> DecodeBatch:
    rows = len(token_ids)
    return DecodeBatch(
        token_ids=token_ids.astype(np.int64),
        positions=np.full(rows, position, np.int32),
        offsets=np.arange(rows + 1, dtype=np.int32),
        self_tables=own,
        cross_tables=cross,
        source_lens=np.full(rows, source_len, np.int32),
        sampling=greedy_sampling(np.arange(rows, dtype=np.int32)),
    )


def bytes_of_step(runner: Runner, load: Load, weight_bytes: int) -> int:
    """Return the bytes that a step in the middle reads at least: its weights once, and every cached token."""
    cached = load.source_len + load.num_steps // 2
    assert runner.facts.block_size == BLOCK_SIZE
    return weight_bytes + load.rows * cached * runner.facts.cache_bytes_per_token
