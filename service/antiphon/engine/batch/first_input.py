"""Input of a row's first step: begin token, prefix, and tokens that were produced before a preemption."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.domain.request import Task
from antiphon.engine.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FirstInput:
    """Tokens that a row feeds at its first step, and the tokens of its target that are scored at this step.

    scored: pairs of an index into `fed` and the token after it. The last token of a target is not among them, because
    the row's own sample scores it.
    """

    fed: tuple[int, ...]
    scored: tuple[tuple[int, int], ...] = ()


def first_input(sequence: Sequence, bos_id: int) -> FirstInput:
    """Return the input of a sequence that starts, or that continues after a preemption."""
    request = sequence.group.request
    input_ids = request.decoder_input_ids(bos_id)
    if request.task is Task.SCORE:
        target_ids = request.target_ids
        return FirstInput((*input_ids, *target_ids[:-1]), tuple(enumerate(target_ids[:-1], len(input_ids) - 1)))
    if sequence.group.is_beam_search and sequence.index > 0:
        return FirstInput(input_ids[:1])  # all beams continue from the first one; results of the others are not read
    return FirstInput((*input_ids, *sequence.produced))


def forced_id(sequence: Sequence) -> int:
    """Return the token that replaces the sequence's first sample; -1 if the first token is sampled."""
    request = sequence.group.request
    if request.task is Task.SCORE:
        return request.target_ids[-1]
    forced = request.params.forced_first_id
    return -1 if forced is None or sequence.produced or sequence.group.is_beam_search else forced
