"""Who joins the next step: pure arithmetic over what waits, what runs and what is free.

First come, first served, but for one thing: an encoder run costs as much for one source as for several of its length,
so the first in line brings along later ones of its length, and when rows are scarce it waits a few steps for company.
Both are bounded: nobody is overtaken by more than `max_overtaking` others, and the first in line by none. No clock,
no tensors, no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

# Steps for which a free row may stay empty, so that sources that could take it are encoded together.
MAX_DEFERRED_STEPS = 4


class Waiting(Protocol):
    """What the scheduler must know of a waiting sequence."""

    @property
    def ticket(self) -> int:
        """Number of its arrival: rising along the queue."""

    @property
    def source_len(self) -> int:
        """Tokens to encode."""

    @property
    def num_blocks(self) -> int:
        """Blocks to reserve."""


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Most sequences that run together, and most tokens encoded in one step.

    A single source longer than the token budget is encoded in a step of its own.
    """

    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def max_overtaking(self) -> int:
        """Most later arrivals that may run before an earlier one; as far as it pays to look for equal lengths."""
        return 4 * self.max_num_seqs

    @property
    def min_free_rows(self) -> int:
        """Free rows that make an encoder run worth starting while more wait than fit."""
        return max(1, self.max_num_seqs // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBatch(Generic[W]):
    """Sources of one length, encoded in one run without padding, in order of arrival."""

    source_len: int
    sequences: tuple[W, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the encoder computes for this run."""
        return self.source_len * len(self.sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Generic[W]):
    """One step: sources to encode, then one token for each of `num_decode_rows` rows, the new ones included.

    num_deferred: steps in a row, this one included, in which free rows stayed empty to be filled together.
    """

    encodes: tuple[EncodeBatch[W], ...]
    num_decode_rows: int
    num_deferred: int = 0


def schedule(
    waiting: Iterable[W], *, num_running: int, num_free_blocks: int, limits: SchedulerLimits, num_deferred: int = 0
) -> Batch[W]:
    """Choose the sequences that join the running ones at this step.

    waiting: the queue, oldest first, or its first limits.max_overtaking sequences
    num_deferred: what the batch of the step before said
    """
    queue = list(waiting)
    room = _Room(rows=limits.max_num_seqs - num_running, blocks=num_free_blocks, tokens=limits.max_num_batched_tokens)
    if queue and room.rows > 0 and num_deferred < MAX_DEFERRED_STEPS and not _is_worthwhile(queue, room, limits):
        return Batch(encodes=(), num_decode_rows=num_running, num_deferred=num_deferred + 1)
    encodes: list[EncodeBatch[W]] = []
    last_ticket = queue[0].ticket + limits.max_overtaking if queue else 0
    while queue and (not encodes or _is_worthwhile(queue, room, limits)):
        group = _take_group(queue, room, last_ticket)
        if not group:
            break
        encodes.append(EncodeBatch(source_len=group[0].source_len, sequences=tuple(group)))
        taken = {sequence.ticket for sequence in group}
        queue = [sequence for sequence in queue if sequence.ticket not in taken]
    return Batch(encodes=tuple(encodes), num_decode_rows=limits.max_num_seqs - room.rows)


@dataclass(kw_only=True, slots=True)
class _Room:
    """What is left in this step."""

    rows: int
    blocks: int
    tokens: int
    is_untouched: bool = True

    def take(self, sequence: Waiting) -> bool:
        """Make room for one more, if there is."""
        fits = sequence.source_len <= self.tokens or self.is_untouched
        if self.rows < 1 or sequence.num_blocks > self.blocks or not fits:
            return False
        self.rows -= 1
        self.blocks -= sequence.num_blocks
        self.tokens -= sequence.source_len
        self.is_untouched = False
        return True


def _is_worthwhile(queue: list[W], room: _Room, limits: SchedulerLimits) -> bool:
    """Whether waiting for more free rows would gain nothing, or they are many already."""
    return len(queue) <= room.rows or room.rows >= limits.min_free_rows


def _take_group(queue: list[W], room: _Room, last_ticket: int) -> list[W]:
    """The first in line and the later ones of its length, as far as there is room; none where it has none itself."""
    source_len = queue[0].source_len
    group: list[W] = []
    for sequence in queue:
        if sequence.ticket > last_ticket:
            break
        if sequence.source_len != source_len:
            if sequence.num_blocks > room.blocks:
                break  # what waits for blocks is not overtaken: those that overtake it would take them
        elif room.take(sequence):
            group.append(sequence)
        else:
            break
    return group
