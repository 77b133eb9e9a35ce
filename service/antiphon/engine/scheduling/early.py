"""Choice of waiting groups whose sources are encoded before rows are free for them.

An encoder run of a few sources costs half as much again for each token as one of many, and free rows that wait for an
encoder run do no work. While many requests wait, a run therefore also encodes sources of groups that find no row yet;
these wait with their cross caches, and start in the step in which a row becomes free. No clock, no side effects.
"""

from __future__ import annotations

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Task
from antiphon.engine.queue.request_queue import RequestQueue
from antiphon.engine.scheduling.scheduler import fits_budget
from antiphon.engine.sequences.sequence import SequenceGroup
from antiphon.runtime.runner import Runner

# Source tokens of a run up to which it takes early groups; all rows of the lane wait for the run. Shipped model, one
# thread of a Zen 5: 9 ms.
EARLY_TOKENS = 512
# A run takes at most one early group for each two rows of the lane, and searches of at most as many beams as it has
# rows: early groups have left the queue, so its order and limits no longer apply to them.
EARLY_ROW_SHARE = 2
# One block in this number stays free for the rows. An early group starts with no more than these, so that early groups
# together never keep one of them from starting.
BLOCK_RESERVE = 4


def may_encode_early(runner: Runner, limits: EngineLimits, num_waiting: int, *, is_contended: bool) -> bool:
    """Return whether sources may be encoded early: requests of one caller wait for more than half of the rows.

    With few requests in the queue, early ones could wait in one lane while another lane has free rows. Between several
    callers, the order of service would have to include requests that have left the queue.
    """
    facts = runner.facts
    return facts.has_encoder and facts.has_decoder and 2 * num_waiting > limits.max_num_seqs and not is_contended


def early_groups(
    queue: RequestQueue,
    joining: tuple[SequenceGroup, ...],
    *,
    limits: EngineLimits,
    num_lanes: int,
    num_free_blocks: int,
    num_blocks: int,
) -> tuple[SequenceGroup, ...]:
    """Return the next waiting groups, in order, that may be encoded with those that join.

    joining: groups that have left the queue. num_free_blocks: blocks left for them. num_blocks: all blocks.
    """
    num_tokens = sum(group.num_prefill_tokens for group in joining)
    longest = max(group.source_len for group in joining)
    max_tokens = min(EARLY_TOKENS, limits.max_num_batched_tokens)
    num_reserved = num_blocks // BLOCK_RESERVE
    num_rows_left = limits.max_num_seqs // num_lanes
    found: list[SequenceGroup] = []
    for group in queue.peek(limits.max_num_seqs // (EARLY_ROW_SHARE * num_lanes)):
        num_tokens += group.source_len
        longest = max(longest, group.source_len)
        num_free_blocks -= group.num_cross_blocks
        num_rows_left -= group.num_first_rows
        is_fitting = num_tokens <= max_tokens and num_free_blocks >= num_reserved and num_rows_left >= 0
        is_encodable = fits_budget(limits.encode_budget, num_tokens, longest)
        if not (is_fitting and is_encodable and _starts_at_once(group, num_reserved)):
            break
        found.append(group)
    return tuple(found)


def _starts_at_once(group: SequenceGroup, num_reserved: int) -> bool:
    """Return whether a group starts all its rows together, with at most num_reserved blocks for them."""
    is_whole = group.num_rows == group.num_first_rows and group.request.task is Task.GENERATE
    return is_whole and group.num_first_rows * group.num_first_blocks <= num_reserved
