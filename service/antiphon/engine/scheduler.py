"""Choice of the sequences that join the next step: arithmetic over waiting sequences, rows in use and free blocks.

Sequences start in the queue's order of service (`fair_queue.py`): none overtakes another. A sequence that can start
with fewer rows than it wants takes the rows that are left. The more sources an encoder pass packs, the less it costs
per source. While more sequences wait than fit, a free row therefore stays empty for a few steps, until more are free.

An encoder run of a few sources costs half as much again for each token as one of many, and free rows that wait for an
encoder run do no work. While many requests wait, a run therefore also encodes sources of groups that find no row yet;
these wait with their cross caches, and start in the step in which a row becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.domain.request import Task
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.sequence import SequenceGroup
from antiphon.runtime.runner import Runner

# Most steps for which a free row stays empty, so that more sources are encoded together.
MAX_DEFERRED_STEPS = 4
# While more sequences wait than fit, an encoder pass starts once one row in this number is free.
FREE_ROW_SHARE = 8


class Waiting(Protocol):
    """Properties of a waiting sequence that the scheduler needs."""

    @property
    def num_rows(self) -> int:
        """Maximum number of rows to take at once."""

    @property
    def num_first_rows(self) -> int:
        """Rows that it needs to start."""

    @property
    def source_len(self) -> int:
        """Tokens to encode; 0 for decoder-only models."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before its first token is sampled."""

    @property
    def num_blocks(self) -> int:
        """Blocks to reserve."""


W = TypeVar("W", bound=Waiting)


class Batch(NamedTuple, Generic[W]):  # mypyc refuses generic dataclasses
    """Sequences that join at one step, in order of arrival.

    num_deferred: consecutive steps, this one included, in which free rows stayed empty to be filled together later.
    """

    joining: tuple[W, ...]
    num_deferred: int = 0


def schedule(
    waiting: Iterable[W],
    *,
    num_running: int,
    num_free_blocks: int,
    limits: EngineLimits,
    num_lanes: int = 1,
    num_deferred: int = 0,
) -> Batch[W]:
    """Choose the sequences that join the running ones at this step.

    A single sequence above a budget of a step is prefilled in a step of its own.
    waiting: the queue, oldest first, or as much of it as could join and one more
    num_running: rows in use, or not to be taken by this lane
    num_lanes: lanes that share the rows
    num_deferred: of the batch of the previous step
    """
    queue = list(waiting)
    num_free_rows = limits.max_num_seqs - num_running
    num_wanted = sum(sequence.num_rows for sequence in queue)
    min_free_rows = max(1, limits.max_num_seqs // (FREE_ROW_SHARE * num_lanes))
    if num_deferred < MAX_DEFERRED_STEPS and num_wanted > num_free_rows > 0 and num_free_rows < min_free_rows:
        return Batch(joining=(), num_deferred=num_deferred + 1)
    joining: list[W] = []
    rows, blocks, tokens = num_free_rows, num_free_blocks, limits.max_num_batched_tokens
    source_tokens = longest = 0
    for sequence in queue:
        rows -= max(sequence.num_first_rows, min(sequence.num_rows, rows))
        blocks -= sequence.num_blocks
        tokens -= sequence.num_prefill_tokens
        source_tokens += sequence.source_len
        longest = max(longest, sequence.source_len)
        is_over = tokens < 0 or not fits_budget(limits.encode_budget, source_tokens, longest)
        if rows < 0 or blocks < 0 or (is_over and joining):
            break
        joining.append(sequence)
    return Batch(joining=tuple(joining))


def fits_budget(budget: EncodeBudget | None, num_tokens: int, longest: int) -> bool:
    """Return whether sources of num_tokens tokens together, the longest of `longest`, may be encoded in one run."""
    return budget is None or budget.fits(num_tokens, longest)


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
    groups: list[SequenceGroup] = []
    for group in queue.peek(limits.max_num_seqs // (EARLY_ROW_SHARE * num_lanes)):
        num_tokens += group.source_len
        longest = max(longest, group.source_len)
        num_free_blocks -= group.num_cross_blocks
        num_rows_left -= group.num_first_rows
        is_fitting = num_tokens <= max_tokens and num_free_blocks >= num_reserved and num_rows_left >= 0
        is_encodable = fits_budget(limits.encode_budget, num_tokens, longest)
        if not (is_fitting and is_encodable and _starts_at_once(group, num_reserved)):
            break
        groups.append(group)
    return tuple(groups)


def _starts_at_once(group: SequenceGroup, num_reserved: int) -> bool:
    """Return whether a group starts all its rows together, with at most num_reserved blocks for them."""
    is_whole = group.num_rows == group.num_first_rows and group.request.task is Task.GENERATE
    return is_whole and group.num_first_rows * group.num_first_blocks <= num_reserved
