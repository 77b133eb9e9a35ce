"""Beams as rows of the batch: the rows of each search, their blocks, and tokens streamed before the end of a search.

Beams share the blocks of their common prefix. A row owns one block of each block column; a column is block_size
consecutive positions of the longest target. In the column that is written now, every beam has a separate block. Blocks
of full columns that no beam reads any more are freed. A block is copied only when two beams are about to write to it.
The search itself is in `beam_search.py`.

Axes: G searches of one shape, W beams, X blocks of the longest target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.service.domain.request import FinishReason
from antiphon.service.engine.batch.row_sampling import num_candidates
from antiphon.service.engine.batch.rows import RunningRows
from antiphon.service.engine.beams.beam_search import BeamSearches, BeamSettings, Hypothesis, Search
from antiphon.service.engine.cache.block_pool import BlockPool
from antiphon.service.engine.sequences.sequence import SequenceGroup
from antiphon.service.engine.sequences.stream import Item, TokenSink
from antiphon.service.runtime.runner import Runner, Samples


@dataclass(eq=False, slots=True)
class _Running:
    """A search and its group. num_streamed: number of streamed tokens of the first output."""

    search: Search
    group: SequenceGroup
    num_streamed: int = 0


class _Shape:
    """The running searches of one width and number of candidates, slot by slot."""

    def __init__(self, width: int, candidates: int, max_len: int) -> None:
        self.searches = BeamSearches(width, candidates, max_len)
        self.running: list[_Running] = []

    def rows(self) -> NDArray[np.int64]:
        """Return the row of every beam, [G, W]."""
        rows = [sequence.row for running in self.running for sequence in running.group.sequences]
        return np.array(rows, np.int64).reshape(len(self.running), self.searches.width)


class BeamRows:
    """All running beam searches, over the rows, blocks and caches of an engine."""

    def __init__(self, rows: RunningRows, pool: BlockPool, runner: Runner) -> None:
        self._rows = rows
        self._pool = pool
        self._runner = runner
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._of: dict[str, tuple[_Shape, _Running]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, group: SequenceGroup) -> None:
        """Start the search of a group that has its rows already."""
        params = group.request.params
        key = (params.beam_width, num_candidates(group))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(*key, self._runner.max_target_len + 1)
        settings = BeamSettings(
            width=params.beam_width,
            num_candidates=key[1],
            max_new_tokens=group.max_new_tokens,
            eos_id=self._runner.eos_id,
            stop_ids=params.stop_ids,
            forced_first_id=params.forced_first_id,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            keeps_logprobs=params.num_logprobs is not None,
        )
        running = _Running(shape.searches.add(settings), group)
        shape.running.append(running)
        self._of[group.request_id] = (shape, running)

    def remove(self, group: SequenceGroup) -> None:
        """Remove the search of a group, if it has one."""
        found = self._of.pop(group.request_id, None)
        if found is None:
            return
        shape, running = found
        slot, last = running.search.slot, shape.running.pop()
        if shape.searches.remove(running.search) is not None:
            shape.running[slot] = last

    def advance(self, samples: Samples) -> list[SequenceGroup]:
        """Move every beam to its next token; returns the groups whose search has ended, their rows not yet freed."""
        ended: list[SequenceGroup] = []
        for shape in self._shapes.values():
            if shape.running:
                ended += self._advance_shape(shape, samples)
        return ended

    def common_tokens(self) -> tuple[list[TokenSink], list[Item]]:
        """Return the common prefix of each search's live beams, as far as not streamed: sinks, a token for each."""
        sinks: list[TokenSink] = []
        items: list[Item] = []
        for shape in self._shapes.values():
            known = np.array([running.num_streamed for running in shape.running], np.int64)
            for slot in np.flatnonzero(shape.searches.agree_on_next(known)).tolist():
                running = shape.running[slot]
                if not running.group.request.is_streamed or running.group.request.params.num_logprobs is not None:
                    continue
                prefix = shape.searches.common_prefix(running.search, running.num_streamed)
                running.num_streamed += len(prefix)
                sinks += [running.group.stream] * len(prefix)
                items += prefix
        return sinks, items

    def hypotheses(self, group: SequenceGroup, reason: FinishReason | None = None) -> tuple[list[Hypothesis], int]:
        """Return a group's outputs, best first, and the number of streamed tokens of the first one.

        reason: finish reason of the live beams of a search that has not ended by itself.
        """
        shape, running = self._of[group.request_id]
        count = group.request.params.num_return_sequences
        return shape.searches.hypotheses(running.search, count, reason=reason), running.num_streamed

    def _advance_shape(self, shape: _Shape, samples: Samples) -> list[SequenceGroup]:
        rows, candidates = shape.rows(), shape.searches.num_candidates
        moves = shape.searches.advance(
            samples.top_ids[rows, :candidates],
            samples.top_scores[rows, :candidates],
            samples.top_logprobs[rows, :candidates],
        )
        self._share_blocks(shape, rows, moves.parents)
        fed = self._rows.positions[rows[:, 0]]  # of the first beam: in a first step the others have fed fewer
        self._rows.token_ids[rows] = moves.token_ids
        self._rows.positions[rows] = fed[:, None] + 1
        self._fork_processors(shape, moves.parents, moves.token_ids)
        return [shape.running[search.slot].group for search in moves.ended]

    def _share_blocks(self, shape: _Shape, rows: NDArray[np.int64], parents: NDArray[np.int64]) -> None:
        """Let every row read its parent's blocks, and write to a separate block."""
        filled = self._rows.positions[rows[:, 0]] + 1  # tokens cached
        block_size = self._pool.block_size
        current = filled // block_size  # the block column that is written next
        is_partial = filled % block_size > 0
        if (parents != np.arange(parents.shape[1])).any():
            own = self._rows.tables.own[rows]  # [G, W, X]
            inherited = self._rows.tables.own[np.take_along_axis(rows, parents, axis=1)]
            is_shared = np.arange(own.shape[2]) < (current + is_partial)[:, None]
            tables = np.where(is_shared[:, None, :], inherited, own)
            self._copy_on_write(tables, own, parents, np.where(is_partial, current, -1))
            self._rows.tables.own[rows] = tables
        for slot in np.flatnonzero(~is_partial).tolist():
            self._give_back(shape.running[slot].group, rows[slot], int(current[slot]))

    def _copy_on_write(
        self,
        tables: NDArray[np.int32],
        own: NDArray[np.int32],
        parents: NDArray[np.int64],
        current: NDArray[np.int64],
    ) -> None:
        """Give a free block to each beam that is about to write to a shared block; changes `tables`.

        current [G]: the block column that is partly written; -1 where a new column begins.
        """
        same = parents[:, :, None] == parents[:, None, :]
        is_later = np.tril(same, -1).any(axis=2) & (current >= 0)[:, None]
        is_free = ~(parents[:, :, None] == np.arange(parents.shape[1])).any(axis=1) & (current >= 0)[:, None]
        slots, later = np.nonzero(is_later)
        if not len(slots):
            return
        # The number of beams without a child equals the number of surplus children; both are ordered by search.
        free = np.nonzero(is_free)[1]
        targets = own[slots, free, current[slots]]
        sources = own[slots, parents[slots, later], current[slots]]
        self._runner.copy_blocks(sources, targets)
        tables[slots, later, current[slots]] = targets

    def _give_back(self, group: SequenceGroup, rows: NDArray[np.int64], num_full: int) -> None:
        """Free the blocks of full block columns that no beam reads any more."""
        named = set(self._rows.tables.own[rows, :num_full].ravel().tolist())
        written = {block for sequence in group.sequences for block in sequence.self_block_table[:num_full]}
        unread = (written - named) & group.blocks
        if unread:
            self._pool.free(unread)
            group.blocks -= unread

    def _fork_processors(self, shape: _Shape, parents: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        for slot, running in enumerate(shape.running):
            sequences = running.group.sequences
            if sequences[0].processors is None:
                continue
            before = [sequence.processors for sequence in sequences]
            taken: set[int] = set()
            for sequence, parent in zip(sequences, parents[slot].tolist(), strict=True):
                processors = before[parent]
                assert processors is not None
                sequence.processors = processors.fork() if parent in taken else processors
                taken.add(parent)
            for sequence, token_id in zip(sequences, token_ids[slot].tolist(), strict=True):
                assert sequence.processors is not None
                sequence.processors.push(token_id)
