"""The next batch of the decoder, as views of the rows' arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.engine.batch.block_tables import BlockTables
from antiphon.engine.batch.first_input import FirstInput
from antiphon.engine.batch.row_sampling import RowSampling, with_scored
from antiphon.engine.sequences.sequence import Sequence
from antiphon.runtime.runner import DecodeBatch, SamplingArrays


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """Arrays of the rows from which a batch is built, each with max_rows entries.

    token_ids, positions: last token that a row feeds at the next step, and its position in the target.
    source_lens: tokens of the source of a row.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int32]
    source_lens: NDArray[np.int32]
    tables: BlockTables
    sampling: RowSampling


class BatchBuilder:
    """Builds the decoder's batches, and keeps the last one until rows or their parameters change.

    scored: sequence and token of each further sample of the last batch; the samples of the rows themselves come first.
    """

    def __init__(self, inputs: RowInputs) -> None:
        self._inputs = inputs
        self._one_each: NDArray[np.int32] = np.arange(len(inputs.token_ids) + 1, dtype=np.int32)
        self._first: dict[int, FirstInput] = {}  # of rows that have not decoded yet and feed more than the begin token
        self._batch: DecodeBatch | None = None
        self.scored: list[tuple[Sequence, int]] = []

    def start(self, row: int, first: FirstInput) -> None:
        """Let a row feed its first input at the next step."""
        self._first[row] = first

    def rows_changed(self) -> None:
        """Forget the last batch: rows were added or removed."""
        self._batch = None

    def move_row(self, source: int, target: int) -> None:
        """Move the last row, `source`, to row `target`, which has ended."""
        self._batch = None
        self._first.pop(target, None)
        if source in self._first:
            self._first[target] = self._first.pop(source)

    def end_first_step(self, num_rows: int) -> None:
        """Forget all first inputs: every row has fed its own."""
        if self._first:
            self._first.clear()
            self._inputs.sampling.end_first_step(num_rows)
            self._batch = None

    def batch(self, sequences: SequenceABC[Sequence]) -> DecodeBatch:
        """Return the next input of the runner, for the sequences of rows 0 and following.

        Its arrays are views. It is the same object until rows or their parameters change.
        """
        if self._batch is None:
            self.scored = []
            self._batch = self._first_batch(sequences) if self._first else self._next_batch(len(sequences))
        sampling = self._inputs.sampling.with_processors(self._batch.sampling)
        return self._batch if sampling is self._batch.sampling else dataclasses.replace(self._batch, sampling=sampling)

    def _next_batch(self, num_rows: int) -> DecodeBatch:
        """Return a batch in which every row feeds one token."""
        inputs = self._inputs
        offsets = self._one_each[: num_rows + 1]
        sampling = inputs.sampling.of_rows(num_rows, self._one_each[:num_rows])
        return self._batch_of(inputs.token_ids[:num_rows], inputs.positions[:num_rows], offsets, sampling)

    def _first_batch(self, sequences: SequenceABC[Sequence]) -> DecodeBatch:
        """Return a batch in which some rows also feed a prefix, or a target to be scored."""
        inputs, num_rows = self._inputs, len(sequences)
        counts = np.ones(num_rows, np.int32)
        for row, first in self._first.items():
            counts[row] = len(first.fed)
        offsets = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        token_ids = np.repeat(inputs.token_ids[:num_rows], counts)
        for row, first in self._first.items():
            token_ids[offsets[row] : offsets[row + 1]] = first.fed
        # A row's last token has position positions[row]; the tokens before it have the positions right before.
        ends = np.repeat(inputs.positions[:num_rows] - offsets[1:] + 1, counts)
        positions = ends + np.arange(offsets[-1], dtype=np.int32)
        sampling = self._with_scored(inputs.sampling.of_rows(num_rows, offsets[1:] - 1), offsets, sequences)
        return self._batch_of(token_ids, positions, offsets, sampling)

    def _batch_of(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int32],
        offsets: NDArray[np.int32],
        sampling: SamplingArrays,
    ) -> DecodeBatch:
        inputs, num_rows = self._inputs, len(offsets) - 1
        return DecodeBatch(
            token_ids=token_ids,
            positions=positions,
            offsets=offsets,
            self_tables=inputs.tables.own[:num_rows],
            cross_tables=inputs.tables.cross[:num_rows],
            source_lens=inputs.source_lens[:num_rows],
            sampling=sampling,
            max_num_logprobs=max(0, int(sampling.ints("num_logprobs").max())),
        )

    def _with_scored(
        self, sampling: SamplingArrays, offsets: NDArray[np.int32], sequences: SequenceABC[Sequence]
    ) -> SamplingArrays:
        """Return the rows' samples followed by one for each token that is scored before a row's last token."""
        scored = [
            (row, int(offsets[row]) + index, token_id)
            for row, first in sorted(self._first.items())
            for index, token_id in first.scored
        ]
        if not scored:
            return sampling
        self.scored = [(sequences[row], token_id) for row, _, token_id in scored]
        rows, picks, token_ids = (list(column) for column in zip(*scored, strict=True))
        return with_scored(sampling, rows, picks, token_ids)
