"""What a step's draw means for the rows that no beam search decides: tokens to tell, and outputs that end.

Changes nothing but what sequences keep of their own tokens. Ends nothing itself; knows no blocks and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.service.domain.request import FinishReason, Task, TokenLogprob
from antiphon.service.engine.batch.rows import RunningRows
from antiphon.service.engine.sequence import Sequence
from antiphon.service.engine.stream import Item, TokenSink
from antiphon.service.runtime.runner import NONE_ALLOWED, NOT_FINITE, Draw


@dataclass(frozen=True, slots=True)
class Ended:
    """An output that is over. logprobs: of the token that ended it, and of a target that was judged."""

    sequence: Sequence
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """Sinks, a token for each, and the outputs that end with this step, last row first."""

    sinks: tuple[TokenSink, ...]
    items: list[Item]
    ended: list[Ended]


def commit(rows: RunningRows, draw: Draw, eos_id: int) -> Committed:
    """Sort out a draw whose tokens the rows have advanced by."""
    num_rows, sinks = len(rows), rows.sinks
    token_ids = draw.token_ids[:num_rows]
    items: list[Item] = token_ids.tolist()
    is_silent = (token_ids == eos_id) | (token_ids < 0)
    is_done = is_silent | (rows.positions[:num_rows] >= rows.end_positions[:num_rows])
    if rows.num_beams:
        is_silent |= rows.is_beam[:num_rows]
        is_done &= ~rows.is_beam[:num_rows]
    stopped, last = _watch(rows, draw, items, is_silent) if rows.checked else ({}, {})
    ended = []
    if stopped or is_done.any():
        is_done[list(stopped)] = True
        for row in reversed(np.flatnonzero(is_done).tolist()):
            reason = stopped.get(row) or _reason(int(token_ids[row]), eos_id)
            ended.append(Ended(rows.sequences[row], reason, last.get(row, ())))
    if is_silent.any():
        heard = np.flatnonzero(~is_silent).tolist()
        return Committed(tuple(sinks[row] for row in heard), [items[row] for row in heard], ended)
    return Committed(sinks, items, ended)


def _reason(token_id: int, eos_id: int) -> FinishReason:
    if token_id == NOT_FINITE:
        return FinishReason.ERROR
    if token_id == NONE_ALLOWED:
        return FinishReason.EXHAUSTED
    return FinishReason.STOP if token_id == eos_id else FinishReason.LENGTH


def _watch(
    rows: RunningRows, draw: Draw, items: list[Item], is_silent: NDArray[np.bool_]
) -> tuple[dict[int, FinishReason], dict[int, tuple[TokenLogprob, ...]]]:
    """Look at the tokens of watched rows; returns rows that stop, and log-probabilities that go with an end.

    Replaces items by ones with log-probabilities, and silences stop ids.
    """
    stopped: dict[int, FinishReason] = {}
    last: dict[int, tuple[TokenLogprob, ...]] = {}
    judged = _judged(rows, draw)
    for sequence in rows.checked:
        row = sequence.row
        assert row is not None
        token_id = int(draw.token_ids[row])
        if token_id < 0:
            continue
        reason = _stop_reason(sequence, token_id, is_silent=bool(is_silent[row]))
        if reason is not None:
            stopped[row] = reason
            is_silent[row] |= not _is_text(sequence, token_id)
        if sequence.processors is not None:
            sequence.processors.push(token_id)
        if (count := sequence.group.request.num_logprobs) is not None:
            item = token_logprob(draw, row, token_id, count)
            given = judged.get(sequence, ())
            sequence.logprob_sum += item.logprob + sum(one.logprob for one in given)
            if is_silent[row]:
                last[row] = (*given, item)
            else:
                items[row] = item
    return stopped, last


def _stop_reason(sequence: Sequence, token_id: int, *, is_silent: bool) -> FinishReason | None:
    """Why a token ends its output, beside the end token and the limits; a stop string is looked for in what is told."""
    request = sequence.group.request
    if request.task is Task.SCORE:
        return FinishReason.STOP
    if token_id in request.params.stop_ids:
        return FinishReason.STOP_SEQUENCE
    if not is_silent and sequence.stop_matcher is not None and sequence.stop_matcher.push(token_id):
        return FinishReason.STOP_SEQUENCE
    return None


def _is_text(sequence: Sequence, token_id: int) -> bool:
    """Whether the token that ended an output belongs to it: that of a stop string does."""
    request = sequence.group.request
    return request.task is Task.GENERATE and token_id not in request.params.stop_ids


def _judged(rows: RunningRows, draw: Draw) -> dict[Sequence, tuple[TokenLogprob, ...]]:
    """Log-probabilities of given targets, their last token's left to the row's own choice."""
    found: dict[Sequence, tuple[TokenLogprob, ...]] = {}
    for choice, (sequence, token_id) in enumerate(rows.scored, len(rows)):
        count = sequence.group.request.num_logprobs or 0
        found[sequence] = (*found.get(sequence, ()), token_logprob(draw, choice, token_id, count))
    return found


def token_logprob(draw: Draw, choice: int, token_id: int, num_alternatives: int) -> TokenLogprob:
    """What the model thought of a choice's token."""
    ids = draw.top_ids[choice, :num_alternatives].tolist()
    logprobs = draw.top_logprobs[choice, :num_alternatives].tolist()
    alternatives = tuple((one, logprob) for one, logprob in zip(ids, logprobs, strict=True) if one >= 0)
    return TokenLogprob(token_id, float(draw.logprobs[choice]), alternatives)
