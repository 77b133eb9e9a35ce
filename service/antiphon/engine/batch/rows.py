"""The running sequences as arrays, so that a step needs no loop over rows.

Rows 0 .. num_rows-1 are in use, in the order of the runner's batches. Allocates no blocks; knows no events and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import Task
from antiphon.engine.batch.batch_builder import BatchBuilder, RowInputs
from antiphon.engine.batch.block_tables import BlockTables
from antiphon.engine.batch.expiries import RowExpiries
from antiphon.engine.batch.first_input import first_input
from antiphon.engine.batch.row_sampling import RowSampling
from antiphon.engine.batch.token_history import TokenHistory
from antiphon.engine.sequences.sequence import Sequence, SequenceGroup
from antiphon.engine.sequences.stream import TokenSink
from antiphon.runtime.runner import DecodeBatch


class RunningRows:
    """The sequences of max_rows rows, and arrays with one entry for each row.

    self_width, cross_width: blocks of the longest target and of the longest source.
    history_width: target positions whose tokens are kept, so that a preempted row can feed them again; 0 keeps
        no tokens.
    token_ids, positions: last token that a row feeds at the next step, and its position in the target. In a row's
        first step the begin token and the prefix precede it.
    end_positions: position at which a row feeds its last token.
    is_beam: rows whose next token a beam search chooses; num_beams: number of these rows.
    checked: sequences that are not beams and whose every token needs a check.
    num_changes: how often rows were added or removed.
    """

    def __init__(self, max_rows: int, *, self_width: int, cross_width: int, history_width: int = 0) -> None:
        self.sequences: list[Sequence] = []
        self.token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.end_positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.is_beam: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.num_beams = 0
        self.checked: list[Sequence] = []
        self.num_changes = 0
        self.tables = BlockTables(max_rows, self_width=self_width, cross_width=cross_width)
        self.expiries = RowExpiries(max_rows)
        self._history = TokenHistory(max_rows, history_width)
        self._inputs = RowInputs(
            token_ids=self.token_ids,
            positions=self.positions,
            source_lens=np.zeros(max_rows, np.int32),
            tables=self.tables,
            sampling=RowSampling(max_rows),
        )
        self._builder = BatchBuilder(self._inputs)
        self._sinks: tuple[TokenSink, ...] | None = ()
        own = (self.token_ids, self.positions, self.end_positions, self._inputs.source_lens, self.is_beam)
        parts = (*self.tables.arrays, *self._inputs.sampling.arrays, self.expiries.times_s, self._history.token_ids)
        self._arrays: tuple[NDArray[Any], ...] = (*own, *parts)  # each with one entry for each row

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sinks(self) -> tuple[TokenSink, ...]:
        """The sink of each row's tokens; the same object until a row is added or removed."""
        if self._sinks is None:
            self._sinks = tuple(sequence.sink for sequence in self.sequences)
        return self._sinks

    @property
    def scored(self) -> list[tuple[Sequence, int]]:
        """Sequence and token of each further sample of the last batch, which scores a token of a target."""
        return self._builder.scored

    def num_generated(self, row: int) -> int:
        """Return the target tokens that a row has produced; the prefix and a given target are not counted."""
        request = self.sequences[row].group.request
        if request.task is Task.SCORE:
            return 0
        return int(self.positions[row]) - len(request.prefix_ids)

    def produced(self, row: int) -> tuple[int, ...]:
        """Return the tokens that a row has produced, oldest first, if they are kept. The last one is not fed yet."""
        num_given = 1 + len(self.sequences[row].group.request.prefix_ids)
        return self._history.of(row, num_given, int(self.positions[row]) + 1)

    def extend(self, sequence: Sequence) -> None:
        """Write the blocks of a sequence again after it received more."""
        self.tables.extend(sequence.running_row(), sequence)

    def append(self, sequences: Iterable[Sequence], bos_id: int) -> None:
        """Give sequences the rows after the last one, ready to decode from the begin token."""
        for sequence in sequences:
            sequence.row = len(self.sequences)
            self._fill(sequence.row, sequence, bos_id)
            self.sequences.append(sequence)
        self._sinks = None
        self.num_changes += 1
        self._builder.rows_changed()

    def batch(self) -> DecodeBatch:
        """Return the next input of the runner."""
        return self._builder.batch(self.sequences)

    def advance(self, token_ids: NDArray[np.int64]) -> None:
        """Let every row feed its new token at the next step; the beam search has advanced its rows already.

        token_ids: [num_rows]; a value below 0 belongs to a row that is about to end, and does not advance it.
        """
        num_rows = len(self.sequences)
        if self.num_beams == num_rows:
            pass  # all of them have advanced
        elif self.num_beams:
            is_own = ~self.is_beam[:num_rows]
            np.copyto(self.token_ids[:num_rows], token_ids, where=is_own)
            self.positions[:num_rows] += is_own & (token_ids >= 0)
        else:
            self.token_ids[:num_rows] = token_ids
            self.positions[:num_rows] += token_ids >= 0
        self._history.push(self.positions[:num_rows], self.token_ids[:num_rows])
        self._builder.end_first_step(num_rows)

    def remove(self, row: int) -> Sequence | None:
        """Free a row. The last row's sequence moves to it and is returned; None when `row` was the last row."""
        removed, last = self.sequences[row], self.sequences.pop()
        removed.row = None
        self.num_beams -= int(self.is_beam[row])
        self._inputs.sampling.remove(removed)
        if removed in self.checked:
            self.checked.remove(removed)
        self._sinks = None
        self.num_changes += 1
        source = len(self.sequences)
        self._builder.move_row(source, row)
        if source == row:
            return None
        for array in self._arrays:
            array[row] = array[source]
        self.sequences[row] = last
        last.row = row
        return last

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Return the groups whose deadline or time limit has come, in order of their rows, the last row first."""
        late = self.expiries.expired(len(self.sequences), now_s)
        return list(dict.fromkeys(self.sequences[row].group for row in late))

    def _fill(self, row: int, sequence: Sequence, bos_id: int) -> None:
        group = sequence.group
        first = first_input(sequence, bos_id)
        self.token_ids[row] = first.fed[-1]
        self.positions[row] = len(first.fed) - 1
        self.end_positions[row] = len(first.fed) - 1 - len(sequence.produced) + group.max_new_tokens
        self._inputs.source_lens[row] = group.source_len
        self.expiries.fill(row, group.expires_s)
        self.is_beam[row] = group.is_beam_search
        self.num_beams += group.is_beam_search
        self.tables.fill(row, sequence)
        self._history.fill(row, first.fed)
        self._inputs.sampling.fill(row, sequence)
        if len(first.fed) > 1 or self._inputs.sampling.is_forced(row):
            self._builder.start(row, first)
        if sequence.needs_token_checks and not group.is_beam_search:
            self.checked.append(sequence)
