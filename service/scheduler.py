"""Who joins the next step: pure arithmetic over what waits, what runs and what is free.

First come, first served, strictly: a sequence that does not fit yet holds back those behind it, so a large request
is delayed by the ones before it and never starved by the ones after. No clock, no tensors, no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the scheduler must know of a waiting sequence."""

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
    """One step: sources to encode, then one token for each of `num_decode_rows` rows, the new ones included."""

    encodes: tuple[EncodeBatch[W], ...]
    num_decode_rows: int


def schedule(waiting: Iterable[W], *, num_running: int, num_free_blocks: int, limits: SchedulerLimits) -> Batch[W]:
    """Choose the sequences that join the running ones at this step: the longest prefix of the queue that fits."""
    by_length: dict[int, list[W]] = {}
    num_rows, num_tokens, num_blocks = num_running, 0, num_free_blocks
    for sequence in waiting:
        num_tokens += sequence.source_len
        num_blocks -= sequence.num_blocks
        over_budget = num_tokens > limits.max_num_batched_tokens and bool(by_length)
        if num_rows >= limits.max_num_seqs or num_blocks < 0 or over_budget:
            break
        by_length.setdefault(sequence.source_len, []).append(sequence)
        num_rows += 1
    encodes = tuple(EncodeBatch(source_len=length, sequences=tuple(group)) for length, group in by_length.items())
    return Batch(encodes=encodes, num_decode_rows=num_rows)
