"""Terminal events of sequences and hypotheses. Builds events only; ends and frees nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from antiphon.domain.request import FinishReason, Timing, TokenEvent, TokenLogprob
from antiphon.engine.beams.beam_search import Hypothesis
from antiphon.engine.sequences.sequence import Sequence, SequenceGroup


def output_event(sequence: Sequence, reason: FinishReason, logprobs: tuple[TokenLogprob, ...] = ()) -> TokenEvent:
    """Return the terminal event of a sequence; its tokens have been streamed already."""
    request = sequence.group.request
    return TokenEvent(
        request_id=request.request_id,
        output_index=sequence.index,
        logprobs=logprobs,
        finish_reason=reason,
        score=None if request.num_logprobs is None else sequence.logprob_sum,
    )


def time_limit_events(group: SequenceGroup) -> list[TokenEvent]:
    """Return the terminal event of each unfinished output of a group that is not a running beam search."""
    reason = FinishReason.TIME_LIMIT
    begun = {one.index: one for one in group.sequences if one.row is not None or one.produced}
    finished = {one.index for one in group.sequences if one.is_finished}
    return [
        output_event(begun[index], reason)
        if index in begun
        else TokenEvent(request_id=group.request_id, output_index=index, finish_reason=reason)
        for index in range(group.request.params.num_return_sequences)
        if index not in finished
    ]


def beam_events(
    group: SequenceGroup, found: Iterable[Hypothesis], num_streamed: int, reason: FinishReason | None
) -> list[TokenEvent]:
    """Return the terminal events of a search's outputs, best first, with the tokens that have not been streamed.

    If the search found fewer outputs than were requested, the others are empty.
    """
    events = [
        _hypothesis_event(group, index, hypothesis, num_streamed if index == 0 else 0)
        for index, hypothesis in enumerate(found)
    ]
    missing = range(len(events), group.request.params.num_return_sequences)
    reason = reason or FinishReason.EXHAUSTED
    return events + [
        TokenEvent(request_id=group.request_id, output_index=index, finish_reason=reason) for index in missing
    ]


def last_of(events: list[TokenEvent], group: SequenceGroup, timing: Timing) -> list[TokenEvent]:
    """Return the same events, the last of them marked as the request's last."""
    *others, last = events
    last = dataclasses.replace(
        last,
        is_last=True,
        num_generated=group.num_generated,
        timing=timing,
        cache_blocks=group.peak_blocks,
        beam_steps=group.beam_steps,
    )
    return [*others, last]


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
