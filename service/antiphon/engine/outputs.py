"""Outputs of a step: tokens to stream, outputs that end, and their terminal events.

This module changes only the state of a sequence that depends on its tokens. It ends no request and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import FinishReason, Task, Timing, TokenEvent, TokenLogprob
from antiphon.engine.batch import RunningRows
from antiphon.engine.beam_search import Hypothesis
from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.engine.stream import Item, TokenSink
from antiphon.runtime.runner import NONE_ALLOWED, NOT_FINITE, Samples


@dataclass(frozen=True, slots=True)
class EndedOutput:
    """An output that ends.

    logprobs: those of the token that ended it, or of the complete scored target. token_ids: of an output that is sent
    as a whole, all tokens of its text.
    """

    sequence: Sequence
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens to stream, items[i] for sinks[i], and the outputs that end with this step, last row first."""

    sinks: tuple[TokenSink, ...]
    items: SequenceABC[Item]
    ended: list[EndedOutput]


def commit(rows: RunningRows, samples: Samples, eos_id: int) -> Committed:
    """Separate the samples of a step, by which the rows have advanced already."""
    token_ids = samples.token_ids[: len(rows)]
    num_rows = len(token_ids)  # the last rows may wait for their first step
    streamed = rows.streamed(num_rows)
    ids: list[int] = token_ids.tolist()
    if not (rows.num_beams or rows.checked or eos_id in ids or min(ids) < 0 or rows.may_end()):
        return Committed(streamed.sinks, streamed.of(ids), [])  # as in most steps: no output ends
    items: list[Item] = [*ids]
    is_silent = (token_ids == eos_id) | (token_ids < 0)
    is_done = is_silent | (rows.positions[:num_rows] >= rows.end_positions[:num_rows])
    if rows.num_beams:
        is_silent |= rows.is_beam[:num_rows]
        is_done &= ~rows.is_beam[:num_rows]
    stopped, last = _check_tokens(rows, samples, items, is_silent) if rows.checked else ({}, {})
    ended = []
    if stopped or is_done.any():
        is_done[list(stopped)] = True
        for row in reversed(np.flatnonzero(is_done).tolist()):
            token_id = int(token_ids[row])
            reason = stopped.get(row) or _reason(token_id, eos_id)
            whole: tuple[int, ...] = ()
            if rows.is_whole[row]:
                whole = rows.produced(row)
                whole = whole[:-1] if is_silent[row] and token_id >= 0 else whole
            ended.append(EndedOutput(rows.sequences[row], reason, last.get(row, ()), whole))
    if (is_silent & streamed.mask).any():
        sent = np.flatnonzero(streamed.mask & ~is_silent).tolist()
        return Committed(tuple(rows.sequences[row].sink for row in sent), [items[row] for row in sent], ended)
    return Committed(streamed.sinks, streamed.of(items), ended)


def _reason(token_id: int, eos_id: int) -> FinishReason:
    if token_id == NOT_FINITE:
        return FinishReason.ERROR
    if token_id == NONE_ALLOWED:
        return FinishReason.EXHAUSTED
    return FinishReason.STOP if token_id == eos_id else FinishReason.LENGTH


def _check_tokens(
    rows: RunningRows, samples: Samples, items: list[Item], is_silent: NDArray[np.bool_]
) -> tuple[dict[int, FinishReason], dict[int, tuple[TokenLogprob, ...]]]:
    """Check the tokens of `rows.checked`. Return rows that stop, and log-probabilities that belong to an end.

    Adds log-probabilities to `items`, and marks stop ids in `is_silent`, so that they are not streamed.
    """
    stopped: dict[int, FinishReason] = {}
    last: dict[int, tuple[TokenLogprob, ...]] = {}
    scored = _scored(rows, samples)
    for sequence in rows.checked:
        row = sequence.running_row()
        if row >= len(is_silent):
            continue
        token_id = int(samples.token_ids[row])
        if token_id < 0:
            continue
        reason = _stop_reason(sequence, token_id, is_silent=bool(is_silent[row]))
        if reason is not None:
            stopped[row] = reason
            is_silent[row] |= not _is_text(sequence, token_id)
        if sequence.processors is not None:
            sequence.processors.push(token_id)
        if (count := sequence.group.request.num_logprobs) is not None:
            item = token_logprob(samples, row, token_id, count)
            earlier = scored.get(sequence, ())
            sequence.logprob_sum += item.logprob + sum(scored_token.logprob for scored_token in earlier)
            if is_silent[row]:
                last[row] = (*earlier, item)
            else:
                items[row] = item
    return stopped, last


def _stop_reason(sequence: Sequence, token_id: int, *, is_silent: bool) -> FinishReason | None:
    """Return why a token ends its output; None if only the end token or a limit can end it.

    Stop strings are searched for in streamed tokens only.
    """
    request = sequence.group.request
    if request.task is Task.SCORE:
        return FinishReason.STOP
    if token_id in request.params.stop_ids:
        return FinishReason.STOP_SEQUENCE
    if not is_silent and sequence.stop_matcher is not None and sequence.stop_matcher.push(token_id):
        return FinishReason.STOP_SEQUENCE
    return None


def _is_text(sequence: Sequence, token_id: int) -> bool:
    """Return whether the token that ended an output is part of its text: the last token of a stop string is."""
    request = sequence.group.request
    return request.task is Task.GENERATE and token_id not in request.params.stop_ids


def _scored(rows: RunningRows, samples: Samples) -> dict[Sequence, tuple[TokenLogprob, ...]]:
    """Return the log-probabilities of targets, without their last tokens, which the rows' own samples score."""
    logprobs: dict[Sequence, tuple[TokenLogprob, ...]] = {}
    for sample, (sequence, token_id) in enumerate(rows.scored, len(rows)):
        count = sequence.group.request.num_logprobs or 0
        logprobs[sequence] = (*logprobs.get(sequence, ()), token_logprob(samples, sample, token_id, count))
    return logprobs


def token_logprob(samples: Samples, sample: int, token_id: int, num_alternatives: int) -> TokenLogprob:
    """Return the log-probability of a sample's token, and those of alternatives."""
    ids = samples.top_ids[sample, :num_alternatives].tolist()
    logprobs = samples.top_logprobs[sample, :num_alternatives].tolist()
    alternatives = tuple((top_id, logprob) for top_id, logprob in zip(ids, logprobs, strict=True) if top_id >= 0)
    return TokenLogprob(token_id, float(samples.logprobs[sample]), alternatives)


def output_event(
    sequence: Sequence,
    reason: FinishReason,
    *,
    logprobs: tuple[TokenLogprob, ...] = (),
    token_ids: tuple[int, ...] = (),
) -> TokenEvent:
    """Return the terminal event of a sequence. token_ids: those that have not been streamed."""
    request = sequence.group.request
    return TokenEvent(
        request_id=request.request_id,
        output_index=sequence.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        score=None if request.num_logprobs is None else sequence.logprob_sum,
    )


def time_limit_events(group: SequenceGroup, rows: RunningRows) -> list[TokenEvent]:
    """Return the terminal event of each unfinished output of a group that is not a running beam search.

    rows: of its lane.
    """
    reason = FinishReason.TIME_LIMIT
    begun = {output.index: output for output in group.sequences if output.row is not None or output.produced}
    finished = {output.index for output in group.sequences if output.is_finished}
    return [
        output_event(begun[index], reason, token_ids=_unsent(begun[index], rows))
        if index in begun
        else TokenEvent(request_id=group.request_id, output_index=index, finish_reason=reason)
        for index in range(group.request.params.num_return_sequences)
        if index not in finished
    ]


def _unsent(sequence: Sequence, rows: RunningRows) -> tuple[int, ...]:
    """Return the tokens of an output that has not ended, if it is sent as a whole."""
    if not sequence.is_whole:
        return ()
    return sequence.produced if sequence.row is None else rows.produced(sequence.row)


def beam_events(
    group: SequenceGroup, hypotheses: Iterable[Hypothesis], num_streamed: int, reason: FinishReason | None
) -> list[TokenEvent]:
    """Return the terminal events of a search's outputs, best first, with the tokens that have not been streamed.

    If the search found fewer outputs than were requested, the others are empty.
    """
    events = [
        _hypothesis_event(group, index, hypothesis, num_streamed if index == 0 else 0)
        for index, hypothesis in enumerate(hypotheses)
    ]
    missing = range(len(events), group.request.params.num_return_sequences)
    reason = reason or FinishReason.EXHAUSTED
    return events + [
        TokenEvent(request_id=group.request_id, output_index=index, finish_reason=reason) for index in missing
    ]


def last_of(events: list[TokenEvent], group: SequenceGroup, timing: Timing) -> list[TokenEvent]:
    """Return the events, the last of them marked as the request's last."""
    last = events[-1]
    last.is_last = True
    last.num_generated = group.num_generated
    last.timing = timing
    last.cache_blocks = group.peak_blocks
    last.beam_steps = group.beam_steps
    return events


def _hypothesis_event(group: SequenceGroup, index: int, hypothesis: Hypothesis, num_streamed: int) -> TokenEvent:
    logprobs: tuple[TokenLogprob, ...] = ()
    if group.request.num_logprobs is not None:
        logprobs = tuple(map(TokenLogprob, hypothesis.token_ids, hypothesis.logprobs))
    return TokenEvent(
        request_id=group.request_id,
        output_index=index,
        token_ids=hypothesis.text_ids[num_streamed:],
        logprobs=logprobs,
        finish_reason=hypothesis.finish_reason,
        score=hypothesis.score,
    )
