"""Native graphs of a bundle, run in plain ONNX Runtime for verification, measurements and tests.

A model with a decoder runs step by step, and the caller chooses the tokens; an encoder-only one returns states and the
outputs of its heads. Blocks are assigned in shuffled order and the pool starts full of NaN, so that a kernel that reads
an unwritten position produces a visible error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import GraphSet
from antiphon.bundle.onnx_runtime import ort
from antiphon.bundle.session import native_session
from antiphon.errors import StepError
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, pool_axes, target_block_size
from antiphon.ops.sampling import SamplingArrays, greedy_sampling

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Lens = NDArray[np.int32]

# Value of table entries behind a row's blocks: a kernel that uses such an entry reads far outside the pool.
_UNUSED_ENTRY = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Encoded sources and reserved blocks for their targets.

    self_tables [R, X], cross_tables [R, Y], source_lens [R]: int32. cache: the pool, of the bundle's cache type.
    For a decoder-only model source_lens are 0 and cross_tables hold unused entries.
    """

    self_tables: Lens
    cross_tables: Lens
    source_lens: Lens
    cache: NDArray[Any]

    def rows(self, chosen: Sequence[int]) -> Sequences:
        """Return the chosen sequences, in this order, with the same pool."""
        return Sequences(
            self_tables=self.self_tables[chosen],
            cross_tables=self.cross_tables[chosen],
            source_lens=self.source_lens[chosen],
            cache=self.cache,
        )


class NativeStepper:
    """Decoder of a native graph set, and its encoder if it has one; each session has a pool of `threads` threads."""

    def __init__(self, directory: Path, graphs: GraphSet, config: ModelConfig, *, threads: int = 1) -> None:
        self._config = config
        self._cache_type = np.dtype(graphs.cache)
        has_encoder = config.architecture != "decoder"
        self._encoder = native_session(directory / graphs.encoder_file, threads) if has_encoder else None
        self._decoder = native_session(directory / graphs.decoder_file, threads)

    def start(self, sources: Sequence[Ids], capacity: int) -> Callable[[Ids, Lens], Floats]:
        """Encode sources and return a function for steps of one token a row.

        The function maps ids [R] int64 and positions [R] int32 to log-probabilities [R, V] float32.
        """
        sequences = self.encode(sources, capacity)
        return lambda ids, positions: self.step(sequences, np.split(ids, len(ids)), positions)

    def encode(self, sources: Sequence[Ids], capacity: int) -> Sequences:
        """Encode sources of any lengths in one packed batch, and reserve blocks for `capacity` target tokens each."""
        lens = np.array([len(source) if self._encoder else 0 for source in sources], np.int32)
        sequences = reserve(lens, capacity, pool_axes(self._config), self._cache_type, target_block_size(self._config))
        if self._encoder is None:
            return sequences
        inputs = {
            "input_ids": np.concatenate(sources),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
            "offsets": offsets_of(lens),
            "block_tables": sequences.cross_tables,
            "cache": sequences.cache,
        }
        run_native(self._encoder, inputs)
        return sequences

    def step(self, sequences: Sequences, tokens: Sequence[Ids], starts: Lens) -> Floats:
        """Feed tokens[r] to each row r from position starts[r] on.

        Returns log-probabilities [R, V] float32 of the next token.
        Raises StepError when the graph's greedy token is not the most likely token.
        """
        counts = [len(row) for row in tokens]
        spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.concatenate(tokens),
            "positions": np.concatenate(spans).astype(np.int32),
            "offsets": offsets_of(counts),
            "self_tables": sequences.self_tables,
            "cross_tables": sequences.cross_tables,
            "source_lens": sequences.source_lens,
            "cache": sequences.cache,
            **sampling_inputs(whole_vocabulary(np.cumsum(counts, dtype=np.int32) - 1, self._config.vocab_size)),
        }
        return listed_logprobs(*run_native(self._decoder, inputs))


def reserve(
    lens: Lens, capacity: int, axes: Sequence[int], dtype: np.dtype[Any], target_block: int = BLOCK_SIZE
) -> Sequences:
    """Reserve blocks for sources of these lengths and `capacity` target tokens each, in a pool full of NaN.

    axes: those of the pool except the number of blocks. target_block: target tokens of a block.
    """
    counts = [blocks_for(int(length)) for length in lens] + [blocks_for(capacity, target_block)] * len(lens)
    order = np.random.default_rng(0).permutation(sum(counts) + 1).astype(np.int32)
    tables = np.split(order, np.cumsum(counts))[: len(counts)]
    return Sequences(
        self_tables=_padded(tables[len(lens) :]),
        cross_tables=_padded(tables[: len(lens)]),
        source_lens=lens,
        cache=np.full((len(order), *axes), np.nan, dtype),
    )


def whole_vocabulary(picks: NDArray[np.int32], vocab_size: int) -> SamplingArrays:
    """Return greedy parameters that request the log-probabilities of the whole vocabulary."""
    sampling = greedy_sampling(picks)
    sampling.ints("num_logprobs")[:] = vocab_size
    return sampling


def sampling_inputs(sampling: SamplingArrays) -> dict[str, NDArray[Any]]:
    """Return the sampling inputs of a decoder graph by name."""
    return {field.name: getattr(sampling, field.name) for field in fields(sampling)}


def run_native(session: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run without copying the inputs and return all outputs; the graph can change input arrays in place."""
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


def listed_logprobs(token_ids: Ids, logprobs: Floats, top_ids: Ids, top_logprobs: Floats, top_scores: Floats) -> Floats:
    """Return log-probabilities [R, V] by token, given a graph's outputs for parameters of `whole_vocabulary`.

    Raises StepError when the outputs contradict each other.
    """
    if (token_ids < 0).any():
        raise StepError(f"logits of rows {np.flatnonzero(token_ids < 0).tolist()} are not finite")
    logprobs_by_id = np.empty_like(top_logprobs)
    np.put_along_axis(logprobs_by_id, top_ids, top_logprobs, axis=1)
    _check_choice(logprobs_by_id, token_ids, logprobs)
    if not np.array_equal(top_scores, top_logprobs):
        raise StepError("top_scores differ from top_logprobs although no logits were changed")
    return logprobs_by_id


def _check_choice(logprobs: Floats, token_ids: Ids, chosen: Floats) -> None:
    """Raise StepError unless the greedy token is the most likely one and its log-probability is the listed one.

    The graph computes the token and the list separately.
    """
    best = logprobs.argmax(axis=1)
    if not np.array_equal(token_ids, best):
        raise StepError(f"greedy tokens {token_ids.tolist()} are not the most likely ones, {best.tolist()}")
    listed = logprobs[np.arange(len(best)), best]
    if not np.array_equal(chosen, listed):
        raise StepError(
            f"log-probabilities of the greedy tokens {chosen.tolist()} differ from the listed ones, {listed.tolist()}"
        )


def _padded(tables: Sequence[Lens]) -> Lens:
    """Return tables as rows of one int32 array; entries beyond a row's blocks are unused entries."""
    padded = np.full((len(tables), max(map(len, tables)) + 1), _UNUSED_ENTRY, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def offsets_of(counts: Sequence[int] | Lens) -> Lens:
    """Return the first token of each row, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


class NativeEncoder:
    """Encoder and heads of a native graph set, with a pool of `threads` threads in each session."""

    def __init__(self, directory: Path, graphs: GraphSet, config: ModelConfig, *, threads: int = 1) -> None:
        self._has_types = config.token_types > 0
        self._encoder = native_session(directory / graphs.encoder_file, threads)
        self._heads = {task: native_session(directory / name, threads) for task, name in graphs.heads.items()}

    def encode(self, sources: Sequence[Ids], types: Sequence[Ids] | None = None) -> list[Floats]:
        """Return float32 states [S, M] of each source [S] int64, all encoded in one packed batch.

        types: token types [S] int64 of each source; None: type 0 for all tokens.
        """
        lens = [len(source) for source in sources]
        offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": np.concatenate(sources),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lens]),
            "offsets": offsets,
        }
        if self._has_types:
            inputs["type_ids"] = np.zeros(offsets[-1], np.int64) if types is None else np.concatenate(types)
        (memory,) = run_native(self._encoder, inputs)
        return np.split(memory, offsets[1:-1])

    def read_out(self, task: Task, hidden: Floats) -> Floats:
        """Return the outputs [K, O] of a task's head for states [K, M], float32."""
        (outputs,) = run_native(self._heads[task], {"hidden": hidden})
        return outputs
