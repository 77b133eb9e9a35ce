"""Who joins the next step: pure arithmetic over what waits, what runs and what is free.

First come, first served: nobody is overtaken. Whoever can do with fewer rows than it wants starts with those left. An
encoder run costs less a source the more sources it packs, so while more wait than fit, a free row may stay empty for a
few steps until others are free with it. No clock, no tensors, no side effects.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Steps for which a free row may stay empty, so that sources that could take it are encoded together.
MAX_DEFERRED_STEPS = 4


class Waiting(Protocol):
    """What the scheduler must know of a waiting sequence."""

    @property
    def num_rows(self) -> int:
        """Most rows to take at once."""

    @property
    def num_first_rows(self) -> int:
        """Rows without which it cannot start."""

    @property
    def source_len(self) -> int:
        """Tokens to encode; 0 where nothing is."""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before its first one is chosen."""

    @property
    def num_blocks(self) -> int:
        """Blocks to reserve."""


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBudget:
    """Workspace that encoding may take, and what it is predicted to take.

    predict: bytes to encode so many tokens together, the longest source having so many; it grows with both.
    """

    max_bytes: float
    predict: Callable[[int, int], float]

    def fits(self, num_tokens: int, longest: int) -> bool:
        """Whether sources of so many tokens together, the longest of so many, may be encoded in one step."""
        return self.predict(num_tokens, longest) <= self.max_bytes

    def longest_source(self, longest: int) -> int:
        """Tokens of the longest source that may be encoded at all, at most `longest`; 0 where none may."""
        lengths = range(1, longest + 1)
        return bisect.bisect_right(lengths, self.max_bytes, key=lambda length: self.predict(length, length))


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Most rows that run together, most tokens prefilled in one step, and the workspace to encode in, where known.

    A single one above a budget of a step is prefilled in a step of its own.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget: EncodeBudget | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def min_free_rows(self) -> int:
        """Free rows that make an encoder run worth starting while more wait than fit."""
        return max(1, self.max_num_seqs // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Generic[W]):
    """One step: sequences to encode in one run, in order of arrival, then one token for them and for all that run.

    num_deferred: steps in a row, this one included, in which free rows stayed empty to be filled together.
    """

    joining: tuple[W, ...]
    num_deferred: int = 0


def schedule(
    waiting: Iterable[W], *, num_running: int, num_free_blocks: int, limits: SchedulerLimits, num_deferred: int = 0
) -> Batch[W]:
    """Choose the sequences that join the running ones at this step.

    waiting: the queue, oldest first, or as much of it as could join and one more
    num_running: rows taken
    num_deferred: what the batch of the step before said
    """
    queue = list(waiting)
    num_free_rows = limits.max_num_seqs - num_running
    wanted = sum(sequence.num_rows for sequence in queue)
    if num_deferred < MAX_DEFERRED_STEPS and wanted > num_free_rows > 0 and num_free_rows < limits.min_free_rows:
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
        is_over = tokens < 0 or not _may_encode(limits.encode_budget, source_tokens, longest)
        if rows < 0 or blocks < 0 or (is_over and joining):
            break
        joining.append(sequence)
    return Batch(joining=tuple(joining))


def _may_encode(budget: EncodeBudget | None, num_tokens: int, longest: int) -> bool:
    return budget is None or budget.fits(num_tokens, longest)
