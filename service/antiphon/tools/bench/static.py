"""Static batches with the same graphs and the same sampler: the baseline of the engine.

A batch is formed, encoded and decoded until its last row has ended; then the next batch starts. With batches in order
of arrival, this is a server without continuous batching. Sorting by length first is impossible with live traffic, and
gives static batches their best speed: the rows of a batch end at nearly the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import greedy_sampling
from antiphon.runtime.runner import DecodeBatch, ModelFacts, Runner
from antiphon.tools.bench.corpus import Ids


def translate_static(
    runner: Runner, sources: Sequence[Ids], *, rows: int, max_new_tokens: int, is_sorted: bool
) -> list[Ids]:
    """Return greedy target ids of each source, in order, with the end token if the target has one.

    is_sorted: batches contain sources of similar length; else sources in order of arrival.
    """
    order = list(range(len(sources)))
    if is_sorted:
        order.sort(key=lambda index: len(sources[index]))
    targets: dict[int, Ids] = {}
    for start in range(0, len(order), rows):
        members = order[start : start + rows]
        batch = StaticBatch(runner, [sources[index] for index in members], max_new_tokens)
        targets.update(zip(members, batch.run(), strict=True))
    return [targets[index] for index in range(len(sources))]


class StaticBatch:
    """Sources that are encoded and greedily decoded together. Each has its own cache blocks, numbered from 0."""

    def __init__(self, runner: Runner, sources: Sequence[Ids], max_new_tokens: int) -> None:
        free, size = count(), runner.facts.block_size
        self._runner = runner
        self._sources = sources
        self._limit = max_new_tokens
        self._source_lens = np.array([len(source) for source in sources], np.int32)
        self._cross = [list(islice(free, blocks_for(len(source), size))) for source in sources]
        self._self = [list(islice(free, blocks_for(max_new_tokens, runner.facts.target_block_size))) for _ in sources]

    @property
    def facts(self) -> ModelFacts:
        """Facts of the runner."""
        return self._runner.facts

    @property
    def num_rows(self) -> int:
        """Number of sources."""
        return len(self._sources)

    def encode(self) -> None:
        """Encode all sources."""
        self._runner.encode(self._sources, self._cross)

    def input(self, token_ids: NDArray[np.int64], position: int) -> DecodeBatch:
        """Return the input of a step that feeds one token to each row at a position."""
        rows, facts = self.num_rows, self.facts
        offsets = np.arange(rows + 1, dtype=np.int32)
        return DecodeBatch(
            token_ids=token_ids,
            positions=np.full(rows, position, np.int32),
            offsets=offsets,
            self_tables=_table(self._self, blocks_for(facts.max_target_len, facts.target_block_size)),
            cross_tables=_table(self._cross, blocks_for(facts.max_source_len, facts.block_size)),
            source_lens=self._source_lens,
            sampling=greedy_sampling(offsets[:-1]),
        )

    def step(self, token_ids: NDArray[np.int64], position: int) -> NDArray[np.int64]:
        """Feed one token to each row at a position; return the next token of each row."""
        return self._runner.decode(self.input(token_ids, position)).token_ids.copy()

    def run(self) -> list[Ids]:
        """Encode, then decode until the last row has ended."""
        self.encode()
        rows = len(self._sources)
        token_ids = np.full(rows, self._runner.facts.bos_id, np.int64)
        target_lens = np.zeros(rows, np.int32)
        has_ended = np.zeros(rows, bool)
        steps: list[NDArray[np.int64]] = []
        while not has_ended.all():
            token_ids = self.step(token_ids, len(steps))
            steps.append(token_ids)
            target_lens += ~has_ended
            has_ended |= (token_ids == self._runner.facts.eos_id) | (len(steps) >= self._limit)
        columns = np.stack(steps, axis=1).tolist()
        return [column[:length] for column, length in zip(columns, target_lens.tolist(), strict=True)]


def _table(tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    table = np.zeros((len(tables), width), np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    return table
