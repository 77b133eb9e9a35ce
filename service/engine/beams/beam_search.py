"""Beam search over many requests at once: from candidates to the next beams, and to finished hypotheses.

Each request follows the rules of transformers' `_beam_search` (5.x). For each beam, 1 + (number of end ids) candidates
are kept. Of the best beam_width candidates, those that end become hypotheses. Of those that do not end, the best
beam_width continue. The arithmetic is vectorised over the searches of one shape; rare cases (an end, a finished search)
are handled one by one. Knows ids and scores; no rows, blocks, models or clocks.

Axes: G searches, W beams, C candidates of each beam, and of each search, T longest target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.service.domain.request import EarlyStopping, FinishReason

_DEAD = -1.0e9  # score of a beam that has no text yet, as in transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSettings:
    """Parameters of one search.

    width: beams. num_candidates: candidates of each beam, and of all beams together.
    max_new_tokens: maximum number of tokens of a hypothesis, the end token included.
    eos_id, stop_ids: tokens that end a hypothesis. forced_first_id: first token, independent of the scores.
    keeps_logprobs: True if hypotheses have log-probabilities.
    """

    width: int
    num_candidates: int
    max_new_tokens: int
    eos_id: int
    stop_ids: tuple[int, ...] = ()
    forced_first_id: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    keeps_logprobs: bool = False


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
    """One running search. slot: present index of its arrays. finished: hypotheses, best first, at most `width`."""

    settings: BeamSettings
    slot: int
    finished: list[Hypothesis] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moves:
    """Next tokens of beams: beam i of slot g continues beam parents[g, i] with token_ids[g, i]; both [G, W].

    ended: searches that have ended; their beams do not continue.
    """

    parents: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    ended: list[Search]


class BeamSearches:
    """The running searches of one width and number of candidates. For one thread.

    Slots 0 .. G-1 are in use; `remove` moves the last one to the freed slot.
    """

    def __init__(self, width: int, num_candidates: int, max_len: int) -> None:
        """max_len: tokens of the longest hypothesis."""
        self.width = width
        self.num_candidates = num_candidates
        self.searches: list[Search] = []
        self._max_len = max_len
        self._scores: NDArray[np.float32] = np.zeros((0, width), np.float32)
        self._token_ids: NDArray[np.int64] = np.zeros((0, width, max_len), np.int64)
        self._logprobs: NDArray[np.float32] = np.zeros((0, width, max_len), np.float32)
        self._end_ids: NDArray[np.int64] = np.zeros((0, num_candidates // width - 1), np.int64)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)  # tokens of every beam so far
        self._max_lengths: NDArray[np.int64] = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.searches)

    def add(self, settings: BeamSettings) -> Search:
        """Start a search; only its first beam has the text so far."""
        slot = len(self.searches)
        if slot == len(self._scores):
            self._grow()
        self._scores[slot] = _DEAD
        self._scores[slot, 0] = 0.0
        self._end_ids[slot] = (settings.eos_id, *settings.stop_ids)
        self._lengths[slot] = 0
        self._max_lengths[slot] = settings.max_new_tokens
        self.searches.append(Search(settings, slot))
        return self.searches[slot]

    def remove(self, search: Search) -> Search | None:
        """Remove a search. Return the last slot's search, which moves to the freed slot; None if it was the last."""
        last = self.searches.pop()
        if last is search:
            return None
        for array in self._arrays():
            array[search.slot] = array[last.slot]
        last.slot = search.slot
        self.searches[search.slot] = last
        return last

    def advance(self, ids: NDArray[np.int64], scores: NDArray[np.float32], logprobs: NDArray[np.float32]) -> Moves:
        """Let every search choose among its beams' candidates.

        ids, scores, logprobs [G, W, C]: candidates of each beam, best first, their additions to its score, and their
        log-probabilities; a missing candidate has id -1 and score -inf.
        """
        count, width = len(self.searches), self.width
        lengths = self._lengths[:count]
        is_first = lengths == 0
        if is_first.any():
            self._force(ids, scores)
        totals = (scores + self._scores[:count, :, None]).reshape(count, -1)
        best = np.argsort(-totals, axis=1, kind="stable")[:, : self.num_candidates]
        parents = best // scores.shape[2]
        best += np.arange(count)[:, None] * totals.shape[1]  # indices into the flattened arrays of all searches
        totals, ids = totals.ravel()[best], ids.ravel()[best]
        is_last = lengths + 1 >= self._max_lengths[:count]
        is_end = (ids[:, :, None] == self._end_ids[:count, None, :]).any(axis=2) | is_last[:, None]
        for slot in np.flatnonzero(is_end[:, :width].any(axis=1)).tolist():
            self._finish(
                self.searches[slot], is_end[slot], parents[slot], ids[slot], totals[slot], best[slot], logprobs
            )
        # A stable sort: candidates that continue keep their order, best first.
        going = np.argsort(is_end, axis=1, kind="stable")[:, :width] + np.arange(count)[:, None] * best.shape[1]
        parents = parents.ravel()[going]
        parents[is_first] = 0  # only the first beam has read the text so far
        ids = np.maximum(ids.ravel()[going], 0)  # a beam without a candidate is dead: feed it any token
        self._scores[:count] = totals.ravel()[going]
        self._remember(parents, ids, logprobs.ravel()[best.ravel()[going]])
        return Moves(parents, ids, [self.searches[slot] for slot in self._ended_slots(is_last)])

    def agree_on_next(self, known: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for every search whether its live beams share the token at an index; known [G]: the indices.

        Most searches do not at most steps, and `common_prefix` is then not needed.
        """
        count = len(self.searches)
        slots = np.arange(count)
        tokens = self._token_ids[slots[:, None], np.arange(self.width), known[:, None]]
        is_alive = self._scores[:count] > _DEAD / 2
        shared = tokens[slots, is_alive.argmax(axis=1)]
        is_same: NDArray[np.bool_] = ((tokens == shared[:, None]) | ~is_alive).all(axis=1)
        return is_same & is_alive.any(axis=1) & (known < self._lengths[:count])

    def common_prefix(self, search: Search, known: int) -> tuple[int, ...]:
        """Return the tokens from index `known` on that all live beams and the best finished hypothesis share."""
        length = self._length(search)
        beams = self._token_ids[search.slot, :, :length]
        alive = beams[self._scores[search.slot] > _DEAD / 2]
        agreed = []
        # text_ids omits the token that ended the hypothesis; at the last step beams have end tokens too.
        best = search.finished[0].text_ids if search.finished else None
        for index in range(known, length):
            token_id = int(alive[0, index]) if len(alive) else -1
            if not len(alive) or (alive[:, index] != token_id).any():
                break
            if best is not None and (index >= len(best) or best[index] != token_id):
                break
            agreed.append(token_id)
        return tuple(agreed)

    def hypotheses(self, search: Search, count: int, *, reason: FinishReason | None = None) -> list[Hypothesis]:
        """Return the best `count` hypotheses, best first. With a reason, live beams end with it and are included."""
        found = list(search.finished)
        if reason is not None and self._length(search):
            scores = self._scores[search.slot].tolist()
            found += [self._cut(search, beam, reason) for beam, score in enumerate(scores) if score > _DEAD / 2]
            found.sort(key=_by_score)
        return found[:count]

    def _force(self, ids: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        for search in self.searches:
            if self._length(search) == 0 and search.settings.forced_first_id is not None:
                # As in transformers' ForcedBOSToken: it adds nothing to the score, and every beam takes it.
                ids[search.slot], scores[search.slot] = -1, -np.inf
                ids[search.slot, :, 0], scores[search.slot, :, 0] = search.settings.forced_first_id, 0.0

    def _finish(
        self,
        search: Search,
        is_end: NDArray[np.bool_],
        parents: NDArray[np.int64],
        ids: NDArray[np.int64],
        totals: NDArray[np.float32],
        best: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Turn the candidates that end, of the best `width`, into hypotheses. best: indices of these in logprobs."""
        settings, length, finished = search.settings, self._length(search), search.finished
        if settings.early_stopping is EarlyStopping.FIRST and len(finished) == settings.width:
            return
        for rank in np.flatnonzero(is_end[: settings.width]).tolist():
            total = float(totals[rank])
            score = total / (length + 1) ** settings.length_penalty
            if total <= _DEAD / 2 or (len(finished) == settings.width and score <= finished[-1].score):
                continue
            beam, token_id = int(parents[rank]), int(ids[rank])
            kept = (
                (*self._beam_logprobs(search, beam), float(logprobs.ravel()[best[rank]]))
                if settings.keeps_logprobs
                else ()
            )
            token_ids = (*self._token_ids[search.slot, beam, :length].tolist(), token_id)
            finished.append(Hypothesis(token_ids, kept, score, _reason(token_id, settings)))
            finished.sort(key=_by_score)
            del finished[settings.width :]

    def _remember(self, parents: NDArray[np.int64], ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Append the new token of every beam to its parent's history."""
        count = len(self.searches)
        slots, beams, ends = np.arange(count)[:, None], np.arange(self.width), self._lengths[:count, None]
        used = int(ends.max(initial=0))
        histories: list[tuple[NDArray[Any], NDArray[Any]]] = [(self._token_ids, ids)]
        if any(search.settings.keeps_logprobs for search in self.searches):
            histories.append((self._logprobs, logprobs))
        for history, added in histories:
            if used and (parents != beams).any():
                history[:count, :, :used] = history[slots, parents, :used]
            history[slots, beams, ends] = added
        self._lengths[:count] += 1

    def _ended_slots(self, is_last: NDArray[np.bool_]) -> list[int]:
        """Return the slots of searches that end: at the maximum length, without a live beam, or if none can improve."""
        is_over = is_last | (self._scores[: len(self.searches), 0] == -np.inf)
        for search in self.searches:
            if len(search.finished) == search.settings.width and not is_over[search.slot]:
                is_over[search.slot] = not self._may_improve(search)
        return np.flatnonzero(is_over).tolist()

    def _may_improve(self, search: Search) -> bool:
        """Return whether a live beam could beat the finished ones (transformers' `_check_early_stop_heuristic`)."""
        settings, running = search.settings, float(self._scores[search.slot, 0])
        if settings.early_stopping is EarlyStopping.FIRST:
            return False
        is_patient = settings.early_stopping is EarlyStopping.NEVER and settings.length_penalty > 0
        length = settings.max_new_tokens if is_patient else self._length(search)
        return bool(running / length**settings.length_penalty > search.finished[-1].score)

    def _cut(self, search: Search, beam: int, reason: FinishReason) -> Hypothesis:
        settings, length = search.settings, self._length(search)
        token_ids = tuple(self._token_ids[search.slot, beam, :length].tolist())
        kept = self._beam_logprobs(search, beam) if settings.keeps_logprobs else ()
        score = float(self._scores[search.slot, beam]) / length**settings.length_penalty
        return Hypothesis(token_ids, kept, score, reason)

    def _beam_logprobs(self, search: Search, beam: int) -> tuple[float, ...]:
        return tuple(self._logprobs[search.slot, beam, : self._length(search)].tolist())

    def _length(self, search: Search) -> int:
        """Return the number of tokens of each of its beams."""
        return int(self._lengths[search.slot])

    def _grow(self) -> None:
        more = max(4, len(self._scores))
        for name in ("_scores", "_token_ids", "_logprobs", "_end_ids", "_lengths", "_max_lengths"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros((more, *array.shape[1:]), array.dtype))))

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self._scores,
            self._token_ids,
            self._logprobs,
            self._end_ids,
            self._lengths,
            self._max_lengths,
        )


def _by_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def _reason(token_id: int, settings: BeamSettings) -> FinishReason:
    if token_id == settings.eos_id:
        return FinishReason.STOP
    return FinishReason.STOP_SEQUENCE if token_id in settings.stop_ids else FinishReason.LENGTH
