"""What is asked and how it ends: plain data that travels from the servicer to the engine and back.

Knows nothing of protobuf, tensors, blocks or clocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from antiphon.service.errors import InvalidArgument

MAX_SEED = 2**64 - 1


class FinishReason(enum.Enum):
    """Why a request's output ended."""

    STOP = "stop"  # the model produced its end token
    LENGTH = "length"  # max_new_tokens or the model's own limit was reached
    CANCELLED = "cancelled"  # the client hung up
    DEADLINE = "deadline"  # the client's deadline passed
    ERROR = "error"  # the engine failed; the stream ends with INTERNAL


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen from one row of logits.

    max_new_tokens: most tokens to produce, the end token included; None is the model's limit.
    temperature: 0 is greedy; otherwise logits are divided by it, (0, 100].
    top_k: keep the k likeliest tokens; 0 keeps all.
    top_p: keep the likeliest tokens whose probabilities reach p, (0, 1].
    seed: 64-bit key of the counter-based generator; the same seed gives the same tokens.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidArgument("max_new_tokens", self.max_new_tokens, "at least 1")
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidArgument("temperature", self.temperature, "between 0 and 100")
        if self.top_k < 0:
            raise InvalidArgument("top_k", self.top_k, "0 (off) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidArgument("seed", self.seed, f"between 0 and {MAX_SEED}")

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One immutable ask, already validated and tokenised.

    source_ids: source tokens, end token included.
    prefix_ids: first target tokens, given and not generated; without the begin token.
    arrival_s, deadline_s: seconds on the engine's monotonic clock; deadline None is no deadline.
    """

    request_id: str
    source_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds a request spent, measured by the engine's clock; None where it never got that far."""

    queued_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """New tokens of one request, oldest first; exactly one event of a request has a finish reason.

    token_ids: new target tokens; the end token is never among them.
    num_generated: target tokens produced so far, the end token included.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_generated: int = 0
    timing: Timing | None = None
    error: Exception | None = field(default=None, compare=False)
