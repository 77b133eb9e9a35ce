"""Test run of a model before its first request, so that no request is slower and a broken model is found early.

Also distinguishes a broken model from bad requests after an engine's steps have failed several times. Writes to the
cache blocks from 0 on and to the first rows, so no sequence may use the runner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import greedy_sampling
from antiphon.runtime.runner import NOT_FINITE, DecodeBatch, Runner

# Length of a typical source in tokens.
_USUAL_LEN = 32
# Only few rows, because a head's outputs may have the width of a vocabulary.
_HEAD_ROWS = 8


class NotFinite(Exception):
    """The outputs of a graph are not finite. part: "encoder", "decoder", or the task of a head."""

    def __init__(self, part: str) -> None:
        super().__init__(f"the outputs of the {part} graph are not finite")
        self.part = part


def warm_up(runner: Runner) -> None:
    """Encode a typical source, then fill every row, decode a token for each, and run every head.

    Raises NotFinite, or the runner's error.
    """
    facts = runner.facts
    if facts.has_encoder:
        usual_len = min(_USUAL_LEN, facts.max_source_len)
        _encode(runner, [[facts.eos_id] * usual_len])
        states = _encode(runner, [[facts.eos_id]] * _num_rows(runner))
        for task in facts.heads:
            num_poolings = len(facts.embedding.poolings) if facts.embedding and task == "embed" else 1
            _check(runner.run_head(task, np.tile(states[:_HEAD_ROWS], num_poolings)), task)
    if facts.has_decoder:
        _decode(runner)


def _num_rows(runner: Runner) -> int:
    """Return the number of rows that can run together, each with one block for its source, if any, and its target."""
    facts = runner.facts
    if not facts.has_decoder:
        return facts.max_rows
    return max(1, min(facts.max_rows, facts.num_blocks // (1 + facts.has_encoder)))


def _encode(runner: Runner, sources: list[list[int]]) -> NDArray[np.float32]:
    """Encode sources into the blocks from 0 on and return their states [N, M]."""
    facts = runner.facts
    num_blocks = [blocks_for(len(source), facts.block_size) if facts.has_decoder else 0 for source in sources]
    ends = np.cumsum(num_blocks).tolist()
    tables = [range(end - count, end) for end, count in zip(ends, num_blocks, strict=True)]
    states = runner.encode(sources, tables, keep_memory=True).memory
    assert states is not None
    _check(states, "encoder")
    return states


def _decode(runner: Runner) -> None:
    """Decode the first token of every row, after the one-token sources in blocks 0 and following."""
    facts = runner.facts
    num_rows = _num_rows(runner)
    rows = np.arange(num_rows, dtype=np.int32)
    samples = runner.decode(
        DecodeBatch(
            token_ids=np.full(num_rows, facts.bos_id, np.int64),
            positions=np.zeros(num_rows, np.int32),
            offsets=np.arange(num_rows + 1, dtype=np.int32),
            self_tables=rows[:, None] + (num_rows if facts.has_encoder else 0),
            cross_tables=rows[:, None],
            source_lens=np.full(num_rows, int(facts.has_encoder), np.int32),
            sampling=greedy_sampling(rows),
        )
    )
    if (samples.token_ids[:num_rows] == NOT_FINITE).any():
        raise NotFinite("decoder")


def _check(outputs: NDArray[np.float32], part: str) -> None:
    if not np.isfinite(outputs).all():
        raise NotFinite(part)
