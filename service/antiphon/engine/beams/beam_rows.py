"""Beams as rows of the batch: the rows of each search, their blocks, and tokens streamed before the end of a search.

Beams share the blocks of their common prefix. A row owns one block of each block column; a column is block_size
consecutive positions of the longest target. In the column that is written now, every beam has a separate block. Blocks
of full columns that no beam reads any more are freed. A block is copied only when two beams are about to write to it.
The search itself is in `beam_search.py`; the tables of all searches are changed by one native call.

Axes: G searches of one shape, W beams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import BeamStep, FinishReason
from antiphon.engine.batch.row_sampling import num_candidates
from antiphon.engine.batch.rows import RunningRows
from antiphon.engine.beams.beam_search import BeamSearches, BeamSettings, Hypothesis, Search
from antiphon.engine.cache.block_pool import BlockPool
from antiphon.engine.sequences.sequence import SequenceGroup
from antiphon.engine.sequences.stream import TokenSink
from antiphon.engine.sequences.unread_tokens import Item
from antiphon.ops.beam_step import EngineRows
from antiphon.runtime.runner import Runner, Samples


@dataclass(eq=False, slots=True)
class _Running:
    """A search and its group."""

    search: Search
    group: SequenceGroup


class _Shape:
    """The running searches of one width and number of candidates, slot by slot."""

    def __init__(self, width: int, candidates: int, max_len: int) -> None:
        self.searches = BeamSearches(width, candidates, max_len)
        self.running: list[_Running] = []
        self._rows: NDArray[np.int64] = np.zeros((0, width), np.int64)
        self._changes = -1

    def rows(self, changes: int) -> NDArray[np.int64]:
        """Return the row of every beam, [G, W]. changes: a number that differs once rows were added or removed."""
        if changes != self._changes:
            rows = [sequence.row for running in self.running for sequence in running.group.sequences]
            self._rows = np.array(rows, np.int64).reshape(len(self.running), self.searches.width)
            self._changes = changes
        return self._rows


class BeamRows:
    """All running beam searches, over the rows, blocks and caches of an engine."""

    def __init__(self, rows: RunningRows, pool: BlockPool, runner: Runner) -> None:
        self._rows = rows
        self._pool = pool
        self._runner = runner
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._of: dict[str, tuple[_Shape, _Running]] = {}
        self._arrays = EngineRows(rows.token_ids, rows.positions, rows.tables.own, pool.block_size)

    def __len__(self) -> int:
        return len(self._of)

    def add(self, group: SequenceGroup) -> None:
        """Start the search of a group that has its rows already."""
        params = group.request.params
        key = (params.beam_width, num_candidates(group))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _Shape(*key, self._runner.facts.max_target_len + 1)
        settings = BeamSettings(
            width=params.beam_width,
            max_new_tokens=group.max_new_tokens,
            eos_id=self._runner.facts.eos_id,
            stop_ids=params.stop_ids,
            forced_first_id=params.forced_first_id,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            keeps_logprobs=params.num_logprobs is not None,
            is_streamed=group.request.is_streamed and params.num_logprobs is None,
            reports_steps=group.request.reports_beam_steps,
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
            for search, token_ids in shape.searches.take_agreed():
                sinks += [shape.running[search.slot].group.stream] * len(token_ids)
                items += token_ids
        return sinks, items

    def hypotheses(self, group: SequenceGroup, reason: FinishReason | None = None) -> tuple[list[Hypothesis], int]:
        """Return a group's outputs, best first, and the number of streamed tokens of the first one.

        reason: finish reason of the live beams of a search that has not ended by itself.
        """
        shape, running = self._of[group.request_id]
        count = group.request.params.num_return_sequences
        found = shape.searches.hypotheses(running.search, count, reason=reason)
        return found, shape.searches.num_streamed(running.search)

    def steps(self, group: SequenceGroup) -> tuple[BeamStep, ...]:
        """Return the steps of a group's search so far; empty unless its request asks for them."""
        _, running = self._of[group.request_id]
        return tuple(running.search.steps)

    def _advance_shape(self, shape: _Shape, samples: Samples) -> list[SequenceGroup]:
        rows = shape.rows(self._rows.num_changes)
        ended = shape.searches.advance((samples.top_ids, samples.top_scores, samples.top_logprobs), rows)
        shared = shape.searches.share(self._arrays, rows)
        if len(shared.sources):
            self._runner.copy_blocks(shared.sources, shared.targets)
        for slot in shared.full:
            group = shape.running[slot].group
            num_cached = int(self._rows.positions[rows[slot, 0]])
            self._give_back(group, rows[slot], num_cached // self._pool.block_size)
        self._fork_processors(shape)
        return [shape.running[search.slot].group for search in ended]

    def _give_back(self, group: SequenceGroup, rows: NDArray[np.int64], num_full: int) -> None:
        """Free the blocks of full block columns that no beam reads any more."""
        named = set(self._rows.tables.own[rows, :num_full].ravel().tolist())
        written = {block for sequence in group.sequences for block in sequence.self_block_table[:num_full]}
        unread = (written - named) & group.blocks
        if unread:
            self._pool.free(unread)
            group.blocks -= unread

    def _fork_processors(self, shape: _Shape) -> None:
        for running in shape.running:
            sequences = running.group.sequences
            if sequences[0].processors is None:
                continue
            parents, token_ids = shape.searches.moves(running.search)
            before = [sequence.processors for sequence in sequences]
            taken: set[int] = set()
            for sequence, parent in zip(sequences, parents, strict=True):
                processors = before[parent]
                assert processors is not None
                sequence.processors = processors.fork() if parent in taken else processors
                taken.add(parent)
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                assert sequence.processors is not None
                sequence.processors.push(token_id)
