"""Limits of one engine: rows, tokens of a step, queue, waiting time, cache and workspace.

The one declaration of each limit, with its default and its allowed values. Settings and command lines build an
`EngineLimits`; engine, queue, scheduler and capacity tools read it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """Allowed values of a limit, both ends included."""

    low: int | float
    high: int | float
    meaning: str
    """Meaning of the limit in one sentence, for flags and settings."""

    @property
    def is_whole(self) -> bool:
        """True for whole numbers."""
        return isinstance(self.low, int)

    @property
    def words(self) -> str:
        """Allowed values in the words of an error message."""
        return f"{'a whole number' if self.is_whole else 'a number'} from {self.low} to {self.high}"

    def holds(self, value: float) -> bool:
        """Return whether a value is allowed; NaN is not, nor a fraction of a whole number."""
        return self.low <= value <= self.high and (not self.is_whole or value == int(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBudget:
    """Limit of the workspace that encoding takes, and its prediction."""

    max_bytes: float
    predict: Callable[[int, int], float]
    """Bytes to encode sources of (tokens together, tokens of the longest); grows with both."""

    def fits(self, num_tokens: int, longest: int) -> bool:
        """Return whether sources with num_tokens tokens together fit one step, the longest with `longest` tokens."""
        return self.predict(num_tokens, longest) <= self.max_bytes

    def longest_source(self, longest: int) -> int:
        """Return the tokens of the longest source that fits alone, at most `longest`; 0 where none fits."""
        lengths = range(1, longest + 1)
        return bisect.bisect_right(lengths, self.max_bytes, key=lambda length: self.predict(length, length))


def _allowed(low: float, high: float, meaning: str) -> Mapping[str, Allowed]:
    return {"allowed": Allowed(low=low, high=high, meaning=meaning)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Limits of one engine. Construction raises ValueError, which names the field, its value and the allowed values.

    None is no limit; for kv_cache_blocks it is enough for max_num_seqs longest sequences.
    encode_budget: known once a bundle with a memory profile is loaded; the only field that is no setting.
    """

    max_num_seqs: int = field(
        default=64, metadata=_allowed(1, 4096, "Maximum rows that decode together: outputs and beams.")
    )
    max_num_batched_tokens: int = field(
        default=1024, metadata=_allowed(1, 1_048_576, "Maximum source, prefix and scored tokens of one step.")
    )
    max_queued_requests: int = field(
        default=1024, metadata=_allowed(1, 1_000_000, "Maximum number of waiting requests.")
    )
    max_queued_tokens: int = field(
        default=131_072, metadata=_allowed(1, 100_000_000, "Maximum source tokens of all waiting requests.")
    )
    max_queue_time_s: float | None = field(
        default=30.0,
        metadata=_allowed(0.001, 86_400, "Longest expected wait at which a request is still accepted."),
    )
    kv_cache_blocks: int | None = field(
        default=None,
        metadata=_allowed(
            1, 100_000_000, "Cache blocks of 16 tokens; unset: enough for max_num_seqs of the longest sequences."
        ),
    )
    workspace_limit_bytes: int | None = field(
        default=None,
        metadata=_allowed(1, 2**50, "Maximum bytes of ONNX Runtime without weights; unset: no limit."),
    )
    encode_budget: EncodeBudget | None = None

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise ValueError(f"{name} is {value}; it must be {allowed.words}")

    @classmethod
    def for_offline_work(cls, max_num_seqs: int) -> Self:
        """Return limits with the largest queue and no limit of the wait, for tools that submit all their requests."""
        return cls(
            max_num_seqs=max_num_seqs,
            max_queued_requests=int(ALLOWED["max_queued_requests"].high),
            max_queued_tokens=int(ALLOWED["max_queued_tokens"].high),
            max_queue_time_s=None,
        )

    @property
    def max_accepted_requests(self) -> int:
        """Maximum number of requests that run or wait."""
        return self.max_num_seqs + self.max_queued_requests

    def num_cache_blocks(self, blocks_of_longest: int) -> int:
        """Return the blocks of the cache of a model whose longest sequence takes blocks_of_longest."""
        return self.kv_cache_blocks or self.max_num_seqs * blocks_of_longest


ALLOWED: Mapping[str, Allowed] = {
    limit.name: limit.metadata["allowed"] for limit in fields(EngineLimits) if "allowed" in limit.metadata
}
"""Allowed values of each limit that is a setting, in order of declaration."""
DEFAULT_LIMITS = EngineLimits()
