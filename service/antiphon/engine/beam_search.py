"""Beam search over many requests at once: from candidates to the next beams, and to finished hypotheses.

Each request follows the rules of transformers' `_beam_search` (5.x). For each beam, 1 + (number of end ids) candidates
are kept. Of the best beam_width candidates, those that end become hypotheses. Of those that do not end, the best
beam_width continue. What happens at every step is native (`antiphon.ops.beam_step`), for all searches of one shape
together; rare cases (an end, a finished search) are handled here, one by one.

Beams are rows of the batch (`BeamRows`), and share the blocks of their common prefix. A row owns one block of each
block column; a column is block_size consecutive positions of the longest target. In the column that is written now,
every beam has a separate block. Blocks of full columns that no beam reads any more are freed. A block is copied only
when two beams are about to write to it.

Axes: G searches of one shape, W beams, C candidates of each beam, and of each search.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.controls.table import EarlyStopping
from antiphon.domain.request import Beam, BeamStep, FinishReason
from antiphon.engine.batch import RunningRows
from antiphon.engine.kv_cache import KVCache
from antiphon.engine.row_sampling import num_candidates
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.stream import Item, TokenSink
from antiphon.ops.beam_step import NONE, Ended, EngineRows, SearchArrays, Shared
from antiphon.runtime.runner import Runner, Samples

_DEAD = -1.0e9  # score of a beam that has no text yet, as in transformers
_LEAST_ALIVE = _DEAD / 2  # every beam with a text has a higher score


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSettings:
    """Parameters of one search.

    width: beams.
    max_new_tokens: maximum number of tokens of a hypothesis, the end token included.
    eos_id, stop_ids: tokens that end a hypothesis. forced_first_id: first token, independent of the scores.
    keeps_logprobs: True if hypotheses have log-probabilities.
    is_streamed: True if tokens are streamed before the end of the search.
    reports_steps: True if every step is recorded.
    """

    width: int
    max_new_tokens: int
    eos_id: int
    stop_ids: tuple[int, ...] = ()
    forced_first_id: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    keeps_logprobs: bool = False
    is_streamed: bool = False
    reports_steps: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished target: its tokens, the one that ended it included, and its score.

    logprobs: the model's log-probabilities of the tokens, if they are kept.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    finish_reason: FinishReason

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Its tokens without the one that ended it, as a client receives them."""
        is_ended_by_token = self.finish_reason in (FinishReason.STOP, FinishReason.STOP_SEQUENCE)
        return self.token_ids[:-1] if is_ended_by_token else self.token_ids


@dataclass(eq=False, slots=True)
class Search:
    """One running search.

    slot: present index of its arrays. finished: hypotheses, best first, at most `width`.
    steps: record of its steps, if its settings ask for it.
    """

    settings: BeamSettings
    slot: int
    finished: list[Hypothesis] = field(default_factory=list)
    steps: list[BeamStep] = field(default_factory=list)


class BeamSearches:
    """The running searches of one width and number of candidates. For one thread.

    Slots 0 .. G-1 are in use; `remove` moves the last one to the freed slot.
    """

    def __init__(self, width: int, num_candidates: int, max_len: int) -> None:
        """max_len: tokens of the longest hypothesis."""
        self.width = width
        self.searches: list[Search] = []
        self._recorded: list[Search] = []  # those that report their steps
        self._agreed: list[tuple[int, int, int]] = []  # of the last step; see SearchArrays.remember
        self._arrays = SearchArrays(width, num_candidates, max_len)

    def __len__(self) -> int:
        return len(self.searches)

    def add(self, settings: BeamSettings) -> Search:
        """Start a search; only its first beam has the text so far."""
        slot, arrays = len(self.searches), self._arrays
        arrays.reserve(slot + 1)
        arrays.scores[slot] = _DEAD
        arrays.scores[slot, 0] = 0.0
        arrays.end_ids[slot] = (settings.eos_id, *settings.stop_ids)
        arrays.lengths[slot] = 0
        arrays.max_lengths[slot] = settings.max_new_tokens
        arrays.forced_ids[slot] = NONE if settings.forced_first_id is None else settings.forced_first_id
        arrays.num_streamed[slot] = 0 if settings.is_streamed else NONE
        search = Search(settings, slot)
        self.searches.append(search)
        if settings.reports_steps:
            self._recorded.append(search)
        return search

    def remove(self, search: Search) -> Search | None:
        """Remove a search. Return the last slot's search, which moves to the freed slot; None if it was the last."""
        if search.settings.reports_steps:
            self._recorded.remove(search)
        last = self.searches.pop()
        if last is search:
            return None
        self._arrays.move(last.slot, search.slot)
        last.slot = search.slot
        self.searches[search.slot] = last
        return last

    def advance(self, candidates: tuple[NDArray[Any], ...], rows: NDArray[np.int64]) -> list[Search]:
        """Let every search choose among its beams' candidates. Return the searches that end.

        candidates, rows: of `SearchArrays.choose`.
        """
        arrays, searches = self._arrays, self.searches
        ended = arrays.choose(candidates, rows)
        for candidate in ended:
            self._finish(searches[candidate.slot], candidate)
        keeps_logprobs = any(search.settings.keeps_logprobs for search in searches)
        self._agreed = arrays.remember(len(searches), keeps_logprobs=keeps_logprobs)
        for search in self._recorded:
            self._record(search, [candidate for candidate in ended if candidate.slot == search.slot])
        is_over: list[bool] = arrays.is_over[: len(searches)].tolist()
        return [search for search in searches if is_over[search.slot] or not self._may_improve(search)]

    def share(self, engine: EngineRows, rows: NDArray[np.int64]) -> Shared:
        """Move the rows [G, W] of all beams to the chosen tokens; see `SearchArrays.share`."""
        return self._arrays.share(engine, rows)

    def moves(self, search: Search) -> tuple[list[int], list[int]]:
        """Return, for each beam of a search, the beam that it followed at the last step, and its new token."""
        return self._arrays.parents[search.slot].tolist(), self._arrays.next_ids[search.slot].tolist()

    def take_agreed(self) -> list[tuple[Search, list[int]]]:
        """Return what each search can stream after the last step, and count it as streamed.

        These are the tokens that all live beams and the best finished hypothesis share.
        """
        agreed: list[tuple[Search, list[int]]] = []
        for slot, beam, count in self._agreed:
            search = self.searches[slot]
            known = int(self._arrays.num_streamed[slot])
            tokens = self._arrays.token_ids[slot, beam, known : known + count].tolist()
            if search.finished:
                # text_ids omits the token that ended the hypothesis; at the last step beams have end tokens too.
                best = search.finished[0].text_ids[known:]
                tokens = [token_id for token_id, _ in itertools.takewhile(_is_same, zip(tokens, best, strict=False))]
            self._arrays.num_streamed[slot] = known + len(tokens)
            agreed.append((search, tokens))
        self._agreed = []
        return agreed

    def num_streamed(self, search: Search) -> int:
        """Return the number of tokens of its first output that were streamed."""
        return max(0, int(self._arrays.num_streamed[search.slot]))

    def hypotheses(self, search: Search, count: int, *, reason: FinishReason | None = None) -> list[Hypothesis]:
        """Return the best `count` hypotheses, best first. With a reason, live beams end with it and are included."""
        hypotheses = list(search.finished)
        if reason is not None and self._length(search):
            scores = self._arrays.scores[search.slot].tolist()
            alive = [beam for beam, score in enumerate(scores) if score > _LEAST_ALIVE]
            hypotheses += [self._cut(search, beam, reason) for beam in alive]
            hypotheses.sort(key=_by_score)
        return hypotheses[:count]

    def _finish(self, search: Search, ended: Ended) -> None:
        """Turn a candidate that ends, of the best `width`, into a hypothesis if it is one of the best."""
        settings, length, finished = search.settings, self._length(search), search.finished
        is_full = len(finished) == settings.width
        score = _score(ended.total, length + 1, settings)
        if ended.total <= _LEAST_ALIVE or (is_full and score <= finished[-1].score):
            return
        kept = (*self._beam_logprobs(search, ended.parent), ended.logprob) if settings.keeps_logprobs else ()
        token_ids = (*self._arrays.token_ids[search.slot, ended.parent, :length].tolist(), ended.token_id)
        finished.append(Hypothesis(token_ids, kept, score, _reason(ended.token_id, settings)))
        finished.sort(key=_by_score)
        del finished[settings.width :]

    def _may_improve(self, search: Search) -> bool:
        """Return whether a live beam could beat the finished ones (transformers' `_check_early_stop_heuristic`)."""
        if len(search.finished) < search.settings.width:
            return True
        settings, running = search.settings, float(self._arrays.scores[search.slot, 0])
        if settings.early_stopping is EarlyStopping.FIRST:
            return False
        is_patient = settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0
        length = settings.max_new_tokens if is_patient else self._length(search)
        return bool(running / length**settings.length_penalty > search.finished[-1].score)

    def _cut(self, search: Search, beam: int, reason: FinishReason) -> Hypothesis:
        settings, length = search.settings, self._length(search)
        token_ids = tuple(self._arrays.token_ids[search.slot, beam, :length].tolist())
        kept = self._beam_logprobs(search, beam) if settings.keeps_logprobs else ()
        score = _score(float(self._arrays.scores[search.slot, beam]), length, settings)
        return Hypothesis(token_ids, kept, score, reason)

    def _record(self, search: Search, ended: list[Ended]) -> None:
        """Append the last step, without beams that have no text, to the record of a search.

        ended: its candidates that ended at this step.
        """
        length, settings, arrays = self._length(search), search.settings, self._arrays
        live: tuple[Beam, ...] = ()
        if length < settings.max_new_tokens:  # otherwise every beam has ended
            totals = arrays.scores[search.slot].tolist()
            moves = zip(*self.moves(search), totals, strict=True)
            live = tuple(Beam(*move) for move in moves if move[2] > _LEAST_ALIVE)
        finished = tuple(
            Beam(candidate.parent, candidate.token_id, candidate.total, _score(candidate.total, length, settings))
            for candidate in ended
            if candidate.total > _LEAST_ALIVE
        )
        search.steps.append(BeamStep(live, finished))

    def _beam_logprobs(self, search: Search, beam: int) -> tuple[float, ...]:
        return tuple(self._arrays.logprobs[search.slot, beam, : self._length(search)].tolist())

    def _length(self, search: Search) -> int:
        """Return the number of tokens of each of its beams."""
        return int(self._arrays.lengths[search.slot])


def _score(total: float, length: int, settings: BeamSettings) -> float:
    """Return the score of a hypothesis of `length` tokens. total: sum of its log-probabilities."""
    return float(total / length**settings.length_penalty)


def _is_same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _by_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def _reason(token_id: int, settings: BeamSettings) -> FinishReason:
    if token_id == settings.eos_id:
        return FinishReason.STOP
    return FinishReason.STOP_SEQUENCE if token_id in settings.stop_ids else FinishReason.LENGTH


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

    def __init__(self, rows: RunningRows, cache: KVCache, runner: Runner) -> None:
        self._rows = rows
        self._cache = cache
        self._runner = runner
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._of: dict[str, tuple[_Shape, _Running]] = {}
        self._arrays = EngineRows(rows.token_ids, rows.positions, rows.tables.own, cache.target_block_size)

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
        entry = self._of.pop(group.request_id, None)
        if entry is None:
            return
        shape, running = entry
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
        hypotheses = shape.searches.hypotheses(running.search, count, reason=reason)
        return hypotheses, shape.searches.num_streamed(running.search)

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
            self._give_back(group, rows[slot], num_cached // self._cache.target_block_size)
        self._fork_processors(shape)
        return [shape.running[search.slot].group for search in ended]

    def _give_back(self, group: SequenceGroup, rows: NDArray[np.int64], num_full: int) -> None:
        """Free the blocks of full block columns that no beam reads any more."""
        named = set(self._rows.tables.own[rows, :num_full].ravel().tolist())
        written = {block for sequence in group.sequences for block in sequence.self_block_table[:num_full]}
        unread = (written - named) & group.blocks
        if unread:
            self._cache.free_unread(group, unread)

    def _fork_processors(self, shape: _Shape) -> None:
        for running in shape.running:
            sequences = running.group.sequences
            if sequences[0].processors is None or sequences[0].processors.is_constant:
                continue  # those of all beams are equal and stay so
            parents, token_ids = shape.searches.moves(running.search)
            before = [sequence.processors for sequence in sequences]
            used: set[int] = set()
            for sequence, parent in zip(sequences, parents, strict=True):
                processors = before[parent]
                assert processors is not None
                sequence.processors = processors.fork() if parent in used else processors
                used.add(parent)
            for sequence, token_id in zip(sequences, token_ids, strict=True):
                assert sequence.processors is not None
                sequence.processors.push(token_id)
