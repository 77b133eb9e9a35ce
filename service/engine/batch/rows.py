"""The running sequences as arrays: what every row needs at every step, kept so that a step has no loop over rows.

Rows 0 .. num_rows-1 are taken, in the order of the runner's batches. Allocates no blocks; knows no events and no clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.ops.counter_random import seed_of_output
from antiphon.service.domain.request import Task
from antiphon.service.engine.sequence import Sequence, SequenceGroup
from antiphon.service.engine.stream import TokenSink
from antiphon.service.runtime.runner import Choices, DecodeBatch

_MAX_TOP_K = 2**31 - 1
# Settings become float32; so small a one may round, but not to 0, which means something else.
_TINY = float(np.finfo(np.float32).tiny)
# What there is one of for each choice; edits there are any number of.
_OF_CHOICES = tuple(field.name for field in dataclasses.fields(Choices) if not field.name.startswith("edit_"))


@dataclass(frozen=True, slots=True)
class _Start:
    """What a row feeds at its first step, and which of these tokens are to be judged: (index, the token after it)."""

    fed: tuple[int, ...]
    judged: tuple[tuple[int, int], ...] = ()


class RunningRows:
    """Arrays of max_rows entries, and the decoder's next batch as views of them.

    self_width, cross_width: blocks of the longest target and source.
    history_width: target positions of which a row's tokens are kept, so that it can feed them again; 0 keeps none.
    keeps_tokens: whether it is not 0. num_self_blocks: blocks that each row's own table names.
    token_ids, positions: the last token a row is to feed, and where it stands; what precedes it in a first step
    is the begin token and the prefix. end_positions: where its last token may be fed.
    is_beam: rows whose next token a beam search decides; num_beams: how many.
    watched: other sequences whose tokens must be looked at one by one.
    judging: sequence and token of every choice of the last batch after the rows' own: targets that are judged.
    """

    def __init__(self, max_rows: int, *, self_width: int, cross_width: int, history_width: int = 0) -> None:
        self.token_ids: NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.end_positions: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.source_lens: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.expiries_s: NDArray[np.float64] = np.full(max_rows, math.inf)
        self.is_beam: NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.self_tables: NDArray[np.int32] = np.zeros((max_rows, self_width), np.int32)
        self.cross_tables: NDArray[np.int32] = np.zeros((max_rows, cross_width), np.int32)
        self.num_self_blocks: NDArray[np.int32] = np.zeros(max_rows, np.int32)
        self.keeps_tokens = history_width > 0
        self._history: NDArray[np.int32] = np.zeros((max_rows, history_width), np.int32)
        self.choices = _no_choices(max_rows)
        own = (self.token_ids, self.positions, self.end_positions, self.source_lens, self.expiries_s, self.is_beam)
        tables = (self.self_tables, self.cross_tables, self.num_self_blocks, self._history)
        chosen = (getattr(self.choices, name) for name in _OF_CHOICES)
        self._arrays: tuple[NDArray[Any], ...] = (*own, *tables, *chosen)
        self._one_each: NDArray[np.int32] = np.arange(max_rows + 1, dtype=np.int32)
        self._starts: dict[int, _Start] = {}  # of rows that have not decoded yet and feed more than the begin token
        self._next_expiry_s = math.inf  # never later than the earliest of a row
        self.sequences: list[Sequence] = []
        self._sinks: tuple[TokenSink, ...] | None = ()
        self._batch: DecodeBatch | None = None
        self._edited: list[Sequence] = []
        self.watched: list[Sequence] = []
        self.judging: list[tuple[Sequence, int]] = []
        self.num_beams = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def sinks(self) -> tuple[TokenSink, ...]:
        """What takes each row's tokens; the same object until a row is added or removed."""
        if self._sinks is None:
            self._sinks = tuple(sequence.sink for sequence in self.sequences)
        return self._sinks

    def num_generated(self, row: int) -> int:
        """Target tokens the row has produced, the prefix and a given target not counted."""
        request = self.sequences[row].group.request
        if request.task is Task.SCORE:
            return 0
        return int(self.positions[row]) - len(request.prefix_ids)

    def produced(self, row: int) -> tuple[int, ...]:
        """Tokens that a row has produced, oldest first, where they are kept; the last is the one it is to feed."""
        sequence, end = self.sequences[row], int(self.positions[row]) + 1
        return tuple(self._history[row, 1 + len(sequence.group.request.prefix_ids) : end].tolist())

    def extend(self, sequence: Sequence) -> None:
        """Note that a sequence's own block table has grown."""
        row = _row(sequence)
        self.num_self_blocks[row] = len(sequence.self_block_table)
        self.self_tables[row, : len(sequence.self_block_table)] = sequence.self_block_table

    def append(self, sequences: Iterable[Sequence], bos_id: int) -> None:
        """Give sequences the rows after the last one, ready to decode from the begin token."""
        for sequence in sequences:
            row = len(self.sequences)
            sequence.row = row
            self._fill(row, sequence, bos_id)
            self._next_expiry_s = min(self._next_expiry_s, float(self.expiries_s[row]))
            self.sequences.append(sequence)
            self.num_beams += int(self.is_beam[row])
            if sequence.edits is not None:
                self._edited.append(sequence)
            if sequence.is_watched and not self.is_beam[row]:
                self.watched.append(sequence)
        self._sinks = self._batch = None

    def batch(self) -> DecodeBatch:
        """What the runner is to decode next: views, the same object until rows or what they ask change."""
        if self._batch is None:
            self.judging = []
            self._batch = self._starting() if self._starts else self._continuing()
        if not self._edited:
            return self._batch
        choices = self._edits_into(self._batch.choices)
        return dataclasses.replace(self._batch, choices=choices)

    def advance(self, token_ids: NDArray[np.int64]) -> None:
        """Let every row feed its new token next; beams have been moved already.

        token_ids: [num_rows]; below 0, of a row about to end: no advance.
        """
        num_rows = len(self.sequences)
        if self.num_beams:
            is_own = ~self.is_beam[:num_rows]
            np.copyto(self.token_ids[:num_rows], token_ids, where=is_own)
            self.positions[:num_rows] += is_own & (token_ids >= 0)
        else:
            self.token_ids[:num_rows] = token_ids
            self.positions[:num_rows] += token_ids >= 0
        if self.keeps_tokens:
            self._history[self._one_each[:num_rows], self.positions[:num_rows]] = self.token_ids[:num_rows]
        if self._starts:
            self._starts.clear()
            self.choices.given_ids[:num_rows] = -1
            self._batch = None

    def remove(self, row: int) -> Sequence | None:
        """Vacate a row. The last row's sequence moves into the hole and is returned; None when `row` was the last."""
        self._forget(self.sequences[row])
        self.num_beams -= int(self.is_beam[row])
        last = self.sequences.pop()
        self._sinks = self._batch = None
        source = len(self.sequences)
        self._starts.pop(row, None)
        if source == row:
            return None
        for array in self._arrays:
            array[row] = array[source]
        if source in self._starts:
            self._starts[row] = self._starts.pop(source)
        self.sequences[row] = last
        last.row = row
        return last

    def expired(self, now_s: float) -> list[SequenceGroup]:
        """Groups whose deadline or time limit has come, that of the last row first."""
        if now_s < self._next_expiry_s:  # spares the scan; a stale bound only costs one
            return []
        expiries_s = self.expiries_s[: len(self.sequences)]
        late = np.flatnonzero(expiries_s <= now_s)
        self._next_expiry_s = float(np.min(expiries_s, initial=math.inf, where=expiries_s > now_s))
        return list(dict.fromkeys(self.sequences[row].group for row in reversed(late.tolist())))

    def _forget(self, sequence: Sequence) -> None:
        sequence.row = None
        if sequence.edits is not None:
            self._edited.remove(sequence)
        if sequence in self.watched:
            self.watched.remove(sequence)

    def _fill(self, row: int, sequence: Sequence, bos_id: int) -> None:
        group = sequence.group
        start = _start(sequence, bos_id)
        self.token_ids[row] = start.fed[-1]
        self.positions[row] = len(start.fed) - 1
        if len(start.fed) > 1:
            self._starts[row] = start
        self.end_positions[row] = len(start.fed) - 1 - len(sequence.produced) + group.max_new_tokens
        self.source_lens[row] = group.source_len
        self.expiries_s[row] = group.expires_s
        self.is_beam[row] = group.is_beam_search
        self.extend(sequence)
        self.cross_tables[row, : len(group.cross_block_table)] = group.cross_block_table
        if self.keeps_tokens:
            self._history[row, : len(start.fed)] = start.fed
        self._settle(row, sequence)
        if self.choices.given_ids[row] >= 0:
            self._starts[row] = start

    def _settle(self, row: int, sequence: Sequence) -> None:
        """How the row chooses."""
        params, chosen = sequence.group.request.params, self.choices
        chosen.temperatures[row] = max(params.temperature, _TINY) if params.temperature else 0.0
        chosen.top_ks[row] = min(params.top_k, _MAX_TOP_K)
        chosen.top_ps[row] = max(params.top_p, _TINY)
        chosen.min_ps[row] = params.min_p
        chosen.typical_ps[row] = max(params.typical_p, _TINY)
        chosen.seeds[row] = seed_of_output(params.seed, sequence.index)
        chosen.given_ids[row] = _given(sequence)
        asked = sequence.group.request.num_logprobs
        chosen.num_logprobs[row] = -1 if asked is None else asked
        chosen.is_normalized[row] = chosen.is_exclusive[row] = 0
        if sequence.edits is not None:
            chosen.is_exclusive[row] = sequence.edits.is_exclusive
        if sequence.group.is_beam_search:
            chosen.is_normalized[row] = 1
            chosen.num_logprobs[row] = num_candidates(sequence.group)

    def _continuing(self) -> DecodeBatch:
        """Every row feeds one token."""
        num_rows = len(self.sequences)
        offsets = self._one_each[: num_rows + 1]
        fed = (self.token_ids[:num_rows], self.positions[:num_rows], offsets)
        return self._batch_of(*fed, self._own_choices(self._one_each[:num_rows]))

    def _starting(self) -> DecodeBatch:
        """Some rows feed a prefix too, or a target to be judged."""
        num_rows = len(self.sequences)
        counts = np.ones(num_rows, np.int32)
        for row, start in self._starts.items():
            counts[row] = len(start.fed)
        offsets = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        token_ids = np.repeat(self.token_ids[:num_rows], counts)
        for row, start in self._starts.items():
            token_ids[offsets[row] : offsets[row + 1]] = start.fed
        # A row's last token stands at positions[row], those before it right before.
        ends = np.repeat(self.positions[:num_rows] - offsets[1:] + 1, counts)
        positions = ends + np.arange(offsets[-1], dtype=np.int32)
        choices = self._judging(self._own_choices(offsets[1:] - 1), offsets)
        return self._batch_of(token_ids, positions, offsets, choices)

    def _batch_of(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int32], offsets: NDArray[np.int32], choices: Choices
    ) -> DecodeBatch:
        num_rows = len(self.sequences)
        return DecodeBatch(
            token_ids=token_ids,
            positions=positions,
            offsets=offsets,
            self_tables=self.self_tables[:num_rows],
            cross_tables=self.cross_tables[:num_rows],
            source_lens=self.source_lens[:num_rows],
            choices=choices,
            max_num_logprobs=max(0, int(choices.num_logprobs.max())),
        )

    def _own_choices(self, picks: NDArray[np.int32]) -> Choices:
        """One choice a row, after the token picked; nothing edited yet."""
        num_rows, held = len(self.sequences), self.choices
        taken = {name: getattr(held, name)[:num_rows] for name in _OF_CHOICES}
        return Choices(
            **taken | {"picks": picks},
            edit_offsets=held.edit_offsets[: num_rows + 1],
            edit_ids=held.edit_ids,
            edit_values=held.edit_values,
        )

    def _judging(self, choices: Choices, offsets: NDArray[np.int32]) -> Choices:
        """The rows' own choices, then one for every token to be judged before a row's last."""
        judged = [
            (row, int(offsets[row]) + index, token_id)
            for row, start in sorted(self._starts.items())
            for index, token_id in start.judged
        ]
        if not judged:
            return choices
        self.judging = [(self.sequences[row], token_id) for row, _, token_id in judged]
        rows, picks, given_ids = (list(column) for column in zip(*judged, strict=True))
        extra = {name: getattr(choices, name)[rows] for name in _OF_CHOICES}
        extra |= {"picks": np.array(picks, np.int32), "given_ids": np.array(given_ids, np.int64)}
        joined = {name: np.concatenate((getattr(choices, name), array)) for name, array in extra.items()}
        none = np.zeros(len(picks), np.int32)
        return dataclasses.replace(choices, **joined, edit_offsets=np.concatenate((choices.edit_offsets, none)))

    def _edits_into(self, choices: Choices) -> Choices:
        """The same choices with what is forbidden, penalised and biased now."""
        counts = np.zeros(len(choices), np.int32)
        ids, values = [], []
        for sequence in sorted(self._edited, key=_row):
            assert sequence.edits is not None
            edited_ids, edited_values = sequence.edits.current()
            counts[_row(sequence)] = len(edited_ids)
            ids.append(edited_ids)
            values.append(edited_values)
        offsets = np.zeros(len(choices) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        return dataclasses.replace(
            choices, edit_offsets=offsets, edit_ids=np.concatenate(ids), edit_values=np.concatenate(values)
        )


def num_candidates(group: SequenceGroup) -> int:
    """Continuations a beam search looks at, of each beam and of all: enough when every beam meets every end."""
    params = group.request.params
    return params.beam_width * (2 + len(params.stop_ids))


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None
    return sequence.row


def _start(sequence: Sequence, bos_id: int) -> _Start:
    request = sequence.group.request
    given_ids = request.given_ids(bos_id)
    if request.task is Task.SCORE:
        target_ids = request.target_ids
        return _Start((*given_ids, *target_ids[:-1]), tuple(enumerate(target_ids[:-1], len(given_ids) - 1)))
    if sequence.group.is_beam_search and sequence.index > 0:
        return _Start(given_ids[:1])  # all beams go on from the first one: what these compute is never looked at
    return _Start((*given_ids, *sequence.produced))


def _given(sequence: Sequence) -> int:
    """The token that stands where the row's first choice would be; -1 where it is free."""
    request = sequence.group.request
    if request.task is Task.SCORE:
        return request.target_ids[-1]
    forced = request.params.forced_first_id
    return -1 if forced is None or sequence.produced or sequence.group.is_beam_search else forced


def _no_choices(max_rows: int) -> Choices:
    return Choices(
        picks=np.zeros(max_rows, np.int32),
        temperatures=np.zeros(max_rows, np.float32),
        top_ks=np.zeros(max_rows, np.int32),
        top_ps=np.ones(max_rows, np.float32),
        min_ps=np.zeros(max_rows, np.float32),
        typical_ps=np.ones(max_rows, np.float32),
        seeds=np.zeros(max_rows, np.uint64),
        given_ids=np.full(max_rows, -1, np.int64),
        num_logprobs=np.full(max_rows, -1, np.int32),
        is_normalized=np.zeros(max_rows, np.int32),
        is_exclusive=np.zeros(max_rows, np.int32),
        edit_offsets=np.zeros(max_rows + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros((0, 3), np.float32),
    )
