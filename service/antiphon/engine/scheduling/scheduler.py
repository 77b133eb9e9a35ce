"""Choice of the sequences that join the next step: arithmetic over waiting sequences, rows in use and free blocks.

Sequences start in order of arrival: none overtakes another. A sequence that can start with fewer rows than it wants
takes the rows that are left. The more sources an encoder pass packs, the less it costs per source. While more sequences
wait than fit, a free row therefore stays empty for a few steps, until more rows are free. No clock, no tensors, no side
effects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from antiphon.domain.limits import EncodeBudget, EngineLimits

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
    wanted = sum(sequence.num_rows for sequence in queue)
    min_free_rows = max(1, limits.max_num_seqs // (FREE_ROW_SHARE * num_lanes))
    if num_deferred < MAX_DEFERRED_STEPS and wanted > num_free_rows > 0 and num_free_rows < min_free_rows:
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
