"""The running sequences as arrays, so that a step needs no loop over rows, and the batch of a step as views of them.

Rows 0 .. num_rows-1 are in use, in the order of the runner's batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import Task
from antiphon.engine.kv_cache import BlockTables
from antiphon.engine.row_sampling import RowSampling, with_scored
from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.engine.stream import Item, TokenSink
from antiphon.ops.cache_geometry import blocks_for
from antiphon.runtime.runner import DecodeBatch, Runner, SamplingArrays


class TokenHistory:
    """Target tokens of max_rows rows by position.

    width: target positions whose tokens are kept; 0 keeps nothing.
    """

    def __init__(self, max_rows: int, width: int) -> None:
        self.token_ids: NDArray[np.int32] = np.zeros((max_rows, width), np.int32)
        self._is_kept = width > 0
        self._rows: NDArray[np.intp] = np.arange(max_rows)

    def fill(self, row: int, token_ids: tuple[int, ...]) -> None:
        """Set the first tokens of a row that starts."""
        if self._is_kept:
            self.token_ids[row, : len(token_ids)] = token_ids

    def push(self, positions: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
        """Set the token of each of the first rows at its position."""
        if self._is_kept:
            self.token_ids[self._rows[: len(positions)], positions] = token_ids

    def of(self, row: int, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens of a row at positions begin .. end-1."""
        return tuple(self.token_ids[row, begin:end].tolist())


class RowExpiries:
    """Time at which each row expires, and a lower bound of the earliest, so that most steps scan nothing.

    times_s: [max_rows], seconds on the engine's clock; infinity for a row without deadline and time limit.
    """

    def __init__(self, max_rows: int) -> None:
        self.times_s: NDArray[np.float64] = np.full(max_rows, math.inf)
        self._earliest_s = math.inf  # never later than the earliest time of a row

    def fill(self, row: int, expires_s: float) -> None:
        """Set the time of a row that starts."""
        self.times_s[row] = expires_s
        self._earliest_s = min(self._earliest_s, expires_s)

    def expired(self, num_rows: int, now_s: float) -> list[int]:
        """Return the rows, of the first num_rows, whose time has come; the last row first."""
        if now_s < self._earliest_s:  # avoids the scan; a bound that is too early costs one scan
            return []
        times_s = self.times_s[:num_rows]
        late: list[int] = np.flatnonzero(times_s <= now_s).tolist()
        self._earliest_s = float(np.min(times_s, initial=math.inf, where=times_s > now_s))
        return late[::-1]


@dataclass(frozen=True, slots=True)
class FirstInput:
    """Tokens that a row feeds at its first step, and the tokens of its target that are scored at this step.

    scored: pairs of an index into `fed` and the token after it. The last token of a target is not among them, because
    the row's own sample scores it.
    """

    fed: tuple[int, ...]
    scored: tuple[tuple[int, int], ...] = ()


def first_input(sequence: Sequence, bos_id: int) -> FirstInput:
    """Return the input of a sequence that starts, or that continues after a preemption."""
    request = sequence.group.request
    input_ids = request.decoder_input_ids(bos_id)
    if request.task is Task.SCORE:
        target_ids = request.target_ids
        return FirstInput((*input_ids, *target_ids[:-1]), tuple(enumerate(target_ids[:-1], len(input_ids) - 1)))
    if sequence.group.is_beam_search and sequence.index > 0:
        return FirstInput(input_ids[:1])  # all beams continue from the first one; results of the others are not read
    return FirstInput((*input_ids, *sequence.produced))


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
        """Forget the first inputs of the first rows, which have fed them."""
        if self._first:
            self._first = {row: first for row, first in self._first.items() if row >= num_rows}
            self._inputs.sampling.end_first_step(num_rows)
            self._batch = None

    def batch(self, sequences: SequenceABC[Sequence], num_due: int) -> DecodeBatch:
        """Return the next input of the runner, for the sequences of rows 0 and following.

        num_due: rows that have decoded before, the first ones. Its arrays are views. It is the same object until rows
        or their parameters change.
        """
        if self._batch is None:
            self.scored = []
            self._batch = self._first_batch(sequences) if self._first else self._next_batch(len(sequences))
        due = None if num_due == len(sequences) else num_due
        if due != self._batch.num_due:
            self._batch = dataclasses.replace(self._batch, num_due=due)
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
            num_own=inputs.tables.num_own[:num_rows],
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


@dataclass(frozen=True, slots=True)
class StreamedRows:
    """Rows whose tokens are streamed: a mask [num_rows], their numbers, and the sink of each."""

    mask: NDArray[np.bool_]
    rows: list[int]
    sinks: tuple[TokenSink, ...]

    def of(self, items: SequenceABC[Item]) -> SequenceABC[Item]:
        """Return the items of these rows; items: of all rows."""
        return items if len(self.rows) == len(items) else [items[row] for row in self.rows]


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
    is_whole: rows whose tokens are sent when they end.
    """

    def __init__(self, max_rows: int, *, self_width: int, cross_width: int, history_width: int = 0) -> None:
        self.sequences: list[Sequence] = []
        self.token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.end_positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.is_beam: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.is_whole: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
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
        self._streamed: StreamedRows | None = None
        self._num_safe_steps = 0  # steps after which no row is at its end position yet; 0: not known
        own = (
            self.token_ids, self.positions, self.end_positions, self._inputs.source_lens, self.is_beam, self.is_whole
        )  # fmt: skip
        parts = (*self.tables.arrays, *self._inputs.sampling.arrays, self.expiries.times_s, self._history.token_ids)
        self._arrays: tuple[NDArray[Any], ...] = (*own, *parts)  # each with one entry for each row

    @classmethod
    def of_runner(cls, runner: Runner, num_rows: int) -> RunningRows:
        """Return num_rows empty rows. They keep their tokens if the runner can resume a preempted row."""
        facts = runner.facts
        return cls(
            num_rows,
            self_width=blocks_for(facts.max_target_len, facts.target_block_size) if facts.has_decoder else 1,
            cross_width=blocks_for(facts.max_source_len, facts.block_size) if facts.has_encoder else 1,
            history_width=1 + facts.max_target_len if facts.has_decoder else 0,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def streamed(self, num_rows: int) -> StreamedRows:
        """Return which of the first rows are streamed; the same object until their number changes, or any row."""
        if self._streamed is None or len(self._streamed.mask) != num_rows:
            is_streamed = ~self.is_whole[:num_rows]
            rows: list[int] = np.flatnonzero(is_streamed).tolist()
            self._streamed = StreamedRows(is_streamed, rows, tuple(self.sequences[row].sink for row in rows))
        return self._streamed

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
        """Return the tokens that a row has produced, oldest first, if they are kept. The last one is not fed yet.

        Among them is an end token, and no value below 0.
        """
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
        self._num_safe_steps = 0
        self._streamed = None
        self.num_changes += 1
        self._builder.rows_changed()

    def slack(self, block_size: int) -> NDArray[np.int32]:
        """Return the number of positions that each row can still write to."""
        num_rows = len(self.sequences)
        slack: NDArray[np.int32] = self._block_ends(block_size) - self.positions[:num_rows]
        return slack

    def num_short_within(self, num_steps: int, block_size: int) -> int:
        """Return the number of rows that will need another block within num_steps steps."""
        ends = self._block_ends(block_size)
        num_rows = len(ends)
        is_short = (ends - self.positions[:num_rows] <= num_steps) & (ends < self.end_positions[:num_rows])
        return int(is_short.sum())

    def batch(self, num_due: int | None = None) -> DecodeBatch:
        """Return the next input of the runner. num_due: rows that have decoded before, the first ones; None: all."""
        return self._builder.batch(self.sequences, len(self.sequences) if num_due is None else num_due)

    def advance(self, token_ids: NDArray[np.int64]) -> None:
        """Let rows feed their new tokens at the next step; the beam search has advanced its rows already.

        token_ids: of all rows, or of the first ones, if the others wait for their first step. A value below 0 belongs
        to a row that is about to end, and does not advance it.
        """
        num_rows = len(token_ids)
        self._num_safe_steps -= 1
        if not self.num_beams and min(token_ids.tolist()) >= 0:  # as nearly always: with few calls of NumPy
            self.token_ids[:num_rows] = token_ids
            self.positions[:num_rows] += 1
        elif self.num_beams < num_rows:  # else all of them have advanced
            advances = (token_ids >= 0) & ~self.is_beam[:num_rows]
            np.copyto(self.token_ids[:num_rows], token_ids, where=advances)
            self.positions[:num_rows] += advances
        self._history.push(self.positions[:num_rows], self.token_ids[:num_rows])
        self._builder.end_first_step(num_rows)

    def may_end(self) -> bool:
        """Return whether a row that is no beam may be at its end position. Most calls compare no arrays."""
        if self._num_safe_steps <= 0:
            num_rows = len(self.sequences)
            self._num_safe_steps = int((self.end_positions[:num_rows] - self.positions[:num_rows]).min())
        return self._num_safe_steps <= 0

    def remove(self, row: int) -> Sequence | None:
        """Free a row. The last row's sequence moves to it and is returned; None when `row` was the last row."""
        removed, last = self.sequences[row], self.sequences.pop()
        removed.row = None
        self.num_beams -= int(self.is_beam[row])
        self._inputs.sampling.remove(removed)
        if removed in self.checked:
            self.checked.remove(removed)
        self._streamed = None
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

    def _block_ends(self, block_size: int) -> NDArray[np.int32]:
        """Return the first position beyond the blocks of each row."""
        ends: NDArray[np.int32] = self.tables.num_own[: len(self.sequences)] * np.int32(block_size)
        return ends

    def _fill(self, row: int, sequence: Sequence, bos_id: int) -> None:
        group = sequence.group
        first = first_input(sequence, bos_id)
        self.token_ids[row] = first.fed[-1]
        self.positions[row] = len(first.fed) - 1
        self.end_positions[row] = len(first.fed) - 1 - len(sequence.produced) + group.max_new_tokens
        self._inputs.source_lens[row] = group.source_len
        self.expiries.fill(row, group.expires_s)
        self.is_beam[row] = group.is_beam_search
        self.is_whole[row] = sequence.is_whole
        self.num_beams += group.is_beam_search
        self.tables.fill(row, sequence)
        self._history.fill(row, first.fed)
        self._inputs.sampling.fill(row, sequence)
        if len(first.fed) > 1 or self._inputs.sampling.is_forced(row):
            self._builder.start(row, first)
        if sequence.needs_token_checks and not group.is_beam_search:
            self.checked.append(sequence)
