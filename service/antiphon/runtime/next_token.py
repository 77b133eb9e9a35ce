"""Scores of every token of the vocabulary after one target, one call at a time, outside the engine.

Opens a runner of its own with one row at the first call: the same graphs over the same mapped weights, and a cache for
one sequence. So a step of the engine never carries the candidates of a whole vocabulary. Knows token ids, not text;
`model/antiphon/ops/sampling_stages.py` makes distributions of the scores.

Axes: V vocabulary, E edits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.graph import GraphError
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import SamplingArrays, neutral_sampling
from antiphon.runtime.runner import NOT_FINITE, DecodeBatch, Runner, Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """Edits of single tokens before the next token is sampled, as SamplingArrays describes them.

    ids [E] int32, values [E, 3] float32. is_exclusive: every token without an edit is forbidden.
    """

    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    is_exclusive: bool = False


@dataclass(frozen=True, slots=True)
class NextScores:
    """Scores of the next token.

    logprobs [V] float32: natural log-probabilities under the model; -inf where the logit is -inf.
    scores [V] float32: edited logits, minus the logarithm of the sum of the model's exp(logit); -inf for a forbidden
        token. Where nothing is edited, they are equal to logprobs.
    """

    logprobs: NDArray[np.float32]
    scores: NDArray[np.float32]


class NextTokenScorer:
    """Scores next tokens of one model. Calls may come from any thread; they wait for each other."""

    def __init__(self, open_runner: Callable[[], Runner]) -> None:
        """Load nothing yet. open_runner: opens a runner for one row, with blocks for its longest source and target."""
        self._open_runner = open_runner
        self._runner: Runner | None = None
        self._lock = threading.Lock()

    def score(self, source_ids: Sequence[int], decoder_input_ids: Sequence[int], edits: Edits) -> NextScores:
        """Return the scores after a target. The bits are those that the engine's own rows sample from.

        source_ids: end token included; empty for a decoder-only model. decoder_input_ids: begin token, prefix and
        generated tokens.

        The caller has checked lengths and ids. Raises GraphError if a graph fails or the scores are not finite, and
        what open_runner raises.
        """
        with self._lock:
            if self._runner is None:
                self._runner = self._open_runner()
            runner = self._runner
            num_source_blocks = blocks_for(len(source_ids), runner.block_size)
            if source_ids:
                runner.encode([source_ids], [range(num_source_blocks)])
            samples = runner.decode(_batch(runner, len(source_ids), decoder_input_ids, edits))
            return _scores_of(samples, runner.vocab_size)


def _batch(runner: Runner, source_len: int, decoder_input_ids: Sequence[int], edits: Edits) -> DecodeBatch:
    """Return a batch that feeds the whole target and samples twice after it: without the edits, then with them."""
    num_fed = len(decoder_input_ids)
    num_source, num_target = blocks_for(source_len, runner.block_size), blocks_for(num_fed, runner.block_size)
    return DecodeBatch(
        token_ids=np.array(decoder_input_ids, np.int64),
        positions=np.arange(num_fed, dtype=np.int32),
        offsets=np.array([0, num_fed], np.int32),
        self_tables=np.arange(num_source, num_source + num_target, dtype=np.int32)[None],
        cross_tables=np.arange(max(1, num_source), dtype=np.int32)[None],  # a table has at least one column
        source_lens=np.array([source_len], np.int32),
        sampling=_sampling(num_fed - 1, edits, runner.vocab_size),
        max_num_logprobs=runner.vocab_size,
    )


def _sampling(pick: int, edits: Edits, vocab_size: int) -> SamplingArrays:
    sampling = replace(
        neutral_sampling(2),
        picks=np.full(2, pick, np.int32),
        edit_offsets=np.array([0, 0, len(edits.ids)], np.int32),
        edit_ids=edits.ids,
        edit_values=edits.values,
    )
    sampling.ints("num_logprobs")[:] = vocab_size
    sampling.ints("is_exclusive")[1] = edits.is_exclusive
    return sampling


def _scores_of(samples: Samples, vocab_size: int) -> NextScores:
    if samples.token_ids[0] == NOT_FINITE:
        raise GraphError("the decoder's scores of the next token are not finite")
    found = np.full((2, vocab_size), -np.inf, np.float32)
    for row, values in enumerate((samples.top_logprobs[0], samples.top_scores[1])):
        is_candidate = samples.top_ids[row] >= 0
        found[row, samples.top_ids[row][is_candidate]] = values[is_candidate]
    return NextScores(*found)
