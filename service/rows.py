"""The running sequences as arrays: what every row needs at every step, kept so that a step has no loop over rows.

Rows 0 .. num_rows-1 are taken, in the order of the runner's caches. Knows no blocks, no events and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from antiphon.service.request import SamplingParams
from antiphon.service.sequence import Sequence
from antiphon.service.stream import OutputStream


class RunningRows:
    """Arrays of max_rows entries: the next input token, cached target tokens, source length, limit and deadline.

    params: sampling parameters of each row.
    """

    def __init__(self, max_rows: int) -> None:
        self.token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.past_lens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.source_lens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.max_new_tokens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.deadlines_s: NDArray[np.float64] = np.full(max_rows, math.inf)
        self._next_deadline_s = math.inf  # never later than the earliest deadline of a row
        self.sequences: list[Sequence] = []
        self.params: list[SamplingParams] = []
        self._num_sampled = 0
        self._streams: list[OutputStream] = []
        self._published: tuple[OutputStream, ...] | None = ()

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sampled_rows(self) -> list[int]:
        """Rows that are not greedy."""
        if not self._num_sampled:
            return []
        return [row for row, params in enumerate(self.params) if not params.is_greedy]

    @property
    def streams(self) -> tuple[OutputStream, ...]:
        """Stream of each row; the same object until a row is added or removed."""
        if self._published is None:
            self._published = tuple(self._streams)
        return self._published

    def append(self, sequences: Iterable[Sequence], bos_id: int) -> None:
        """Give sequences the rows after the last one, ready to decode from the begin token."""
        for sequence in sequences:
            row = len(self.sequences)
            self.token_ids[row] = bos_id
            self.past_lens[row] = 0
            self.source_lens[row] = sequence.source_len
            self.max_new_tokens[row] = sequence.max_new_tokens
            deadline_s = sequence.request.deadline_s
            self.deadlines_s[row] = math.inf if deadline_s is None else deadline_s
            self._next_deadline_s = min(self._next_deadline_s, float(self.deadlines_s[row]))
            sequence.row = row
            self.sequences.append(sequence)
            self.params.append(sequence.request.params)
            self._streams.append(sequence.stream)
            self._num_sampled += not sequence.request.params.is_greedy
        self._published = None

    def remove(self, row: int) -> Sequence | None:
        """Vacate a row. The last row's sequence moves into the hole and is returned; None when `row` was the last."""
        self.sequences[row].row = None
        self._num_sampled -= not self.params[row].is_greedy
        last, last_params, last_stream = self.sequences.pop(), self.params.pop(), self._streams.pop()
        moved = None
        source = len(self.sequences)
        if source != row:
            for array in (self.token_ids, self.past_lens, self.source_lens, self.max_new_tokens, self.deadlines_s):
                array[row] = array[source]
            self.sequences[row] = moved = last
            self.params[row] = last_params
            self._streams[row] = last_stream
            last.row = row
        self._published = None
        return moved

    def expired(self, now_s: float) -> list[Sequence]:
        """Sequences whose deadline has come, last row first."""
        if now_s < self._next_deadline_s:  # spares the scan; a stale bound only costs one
            return []
        deadlines_s = self.deadlines_s[: len(self.sequences)]
        late = np.flatnonzero(deadlines_s <= now_s)
        self._next_deadline_s = float(np.min(deadlines_s, initial=math.inf, where=deadlines_s > now_s))
        return [self.sequences[row] for row in reversed(late.tolist())]
