"""The running sequences as arrays: what every row needs at every step, kept so that a step has no loop over rows.

Rows 0 .. num_rows-1 are taken, in the order of the runner's batches. Allocates no blocks; knows no events and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from antiphon.service.runner import DecodeBatch
from antiphon.service.sequence import Sequence
from antiphon.service.stream import OutputStream

_MAX_TOP_K = 2**31 - 1
# Settings become float32; so small a one may round, but not to 0, which means something else.
_TINY = float(np.finfo(np.float32).tiny)


class RunningRows:
    """Arrays of max_rows entries, and the decoder's next batch as views of them.

    self_width, cross_width: blocks of the longest target and source.
    token_ids, positions: the last token a row is to feed, and where it stands; what precedes it in a first step
    is the begin token and the prefix. end_positions: where its last token may be fed.
    """

    def __init__(self, max_rows: int, *, self_width: int, cross_width: int) -> None:
        self.token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.end_positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.source_lens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.deadlines_s: NDArray[np.float64] = np.full(max_rows, math.inf)
        self.self_tables: NDArray[np.int32] = np.zeros((max_rows, self_width), np.int32)
        self.cross_tables: NDArray[np.int32] = np.zeros((max_rows, cross_width), np.int32)
        self.temperatures: NDArray[np.float32] = np.zeros(max_rows, np.float32)
        self.top_ks: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.top_ps: NDArray[np.float32] = np.ones(max_rows, np.float32)
        self.seeds: NDArray[np.uint64] = np.zeros(max_rows, np.uint64)
        self._one_each: NDArray[np.int32] = np.arange(max_rows + 1, dtype=np.int32)
        self._first_fed: dict[int, list[int]] = {}  # begin token and prefix of rows that have not decoded yet
        self._next_deadline_s = math.inf  # never later than the earliest deadline of a row
        self.sequences: list[Sequence] = []
        self._streams: list[OutputStream] = []
        self._published: tuple[OutputStream, ...] | None = ()
        self._batch: DecodeBatch | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def streams(self) -> tuple[OutputStream, ...]:
        """Stream of each row; the same object until a row is added or removed."""
        if self._published is None:
            self._published = tuple(self._streams)
        return self._published

    def num_generated(self, row: int) -> int:
        """Target tokens the row has produced, the prefix not counted."""
        return int(self.positions[row]) - len(self.sequences[row].request.prefix_ids)

    def append(self, sequences: Iterable[Sequence], bos_id: int) -> None:
        """Give sequences the rows after the last one, ready to decode from the begin token."""
        for sequence in sequences:
            row = len(self.sequences)
            self._fill(row, sequence, (bos_id, *sequence.request.prefix_ids))
            self._next_deadline_s = min(self._next_deadline_s, float(self.deadlines_s[row]))
            sequence.row = row
            self.sequences.append(sequence)
            self._streams.append(sequence.stream)
        self._published = self._batch = None

    def batch(self) -> DecodeBatch:
        """What the runner is to decode next: views, the same object until rows or what they feed change in number."""
        if self._batch is None:
            num_rows = len(self.sequences)
            token_ids, positions, offsets = self._fed() if self._first_fed else self._fed_one_each()
            self._batch = DecodeBatch(
                token_ids=token_ids,
                positions=positions,
                offsets=offsets,
                self_tables=self.self_tables[:num_rows],
                cross_tables=self.cross_tables[:num_rows],
                source_lens=self.source_lens[:num_rows],
                temperatures=self.temperatures[:num_rows],
                top_ks=self.top_ks[:num_rows],
                top_ps=self.top_ps[:num_rows],
                seeds=self.seeds[:num_rows],
            )
        return self._batch

    def advance(self, token_ids: NDArray[np.int64]) -> None:
        """Let every row feed its new token next. token_ids: [num_rows]; -1, of a row about to end, advances nothing."""
        num_rows = len(self.sequences)
        self.token_ids[:num_rows] = token_ids
        self.positions[:num_rows] += token_ids >= 0
        if self._first_fed:
            self._first_fed.clear()
            self._batch = None

    def remove(self, row: int) -> Sequence | None:
        """Vacate a row. The last row's sequence moves into the hole and is returned; None when `row` was the last."""
        self.sequences[row].row = None
        last, last_stream = self.sequences.pop(), self._streams.pop()
        self._published = self._batch = None
        source = len(self.sequences)
        self._first_fed.pop(row, None)
        if source == row:
            return None
        for array in self._arrays():
            array[row] = array[source]
        if source in self._first_fed:
            self._first_fed[row] = self._first_fed.pop(source)
        self.sequences[row], self._streams[row] = last, last_stream
        last.row = row
        return last

    def expired(self, now_s: float) -> list[Sequence]:
        """Sequences whose deadline has come, last row first."""
        if now_s < self._next_deadline_s:  # spares the scan; a stale bound only costs one
            return []
        deadlines_s = self.deadlines_s[: len(self.sequences)]
        late = np.flatnonzero(deadlines_s <= now_s)
        self._next_deadline_s = float(np.min(deadlines_s, initial=math.inf, where=deadlines_s > now_s))
        return [self.sequences[row] for row in reversed(late.tolist())]

    def _fill(self, row: int, sequence: Sequence, fed: tuple[int, ...]) -> None:
        request, params = sequence.request, sequence.request.params
        self.token_ids[row] = fed[-1]
        self.positions[row] = len(fed) - 1
        if len(fed) > 1:
            self._first_fed[row] = list(fed)
        self.end_positions[row] = len(fed) - 1 + sequence.max_new_tokens
        self.source_lens[row] = sequence.source_len
        self.deadlines_s[row] = math.inf if request.deadline_s is None else request.deadline_s
        self.self_tables[row, : len(sequence.self_block_table)] = sequence.self_block_table
        self.cross_tables[row, : len(sequence.cross_block_table)] = sequence.cross_block_table
        self.temperatures[row] = max(params.temperature, _TINY) if params.temperature else 0.0
        self.top_ks[row] = min(params.top_k, _MAX_TOP_K)
        self.top_ps[row] = max(params.top_p, _TINY)
        self.seeds[row] = params.seed

    def _fed_one_each(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        num_rows = len(self.sequences)
        return self.token_ids[:num_rows], self.positions[:num_rows], self._one_each[: num_rows + 1]

    def _fed(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        """Token ids, positions and offsets of a step in which some rows feed a prefix too."""
        num_rows = len(self.sequences)
        counts = np.ones(num_rows, np.int32)
        for row, fed in self._first_fed.items():
            counts[row] = len(fed)
        offsets = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        token_ids = np.repeat(self.token_ids[:num_rows], counts)
        for row, fed in self._first_fed.items():
            token_ids[offsets[row] : offsets[row + 1]] = fed
        # A row's last token stands at positions[row], those before it right before.
        ends = np.repeat(self.positions[:num_rows] - offsets[1:] + 1, counts)
        return token_ids, ends + np.arange(offsets[-1], dtype=np.int32), offsets

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.token_ids,
            self.positions,
            self.end_positions,
            self.source_lens,
            self.deadlines_s,
            self.self_tables,
            self.cross_tables,
            self.temperatures,
            self.top_ks,
            self.top_ps,
            self.seeds,
        )
