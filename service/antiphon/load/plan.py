"""Plan of a load test: validated plain data that is sent to every client process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from antiphon.client import DEFAULT_TARGET, Connection, Priority

_MAX_RATE = 100_000


class PlanError(ValueError):
    """A plan is invalid; the message names the flag, its value and the allowed values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Content of one request."""

    source: str | tuple[int, ...]
    """A text, or token ids."""
    max_new_tokens: int | None = None
    """None takes the model's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Limits of a good answer, in seconds from its scheduled arrival; None is no limit.

    A run meets the objective if 99 % of its answers are within each limit.
    """

    ttft_s: float | None = None
    """Maximum time to the first token."""
    e2e_s: float | None = None
    """Maximum time to the end of the answer."""

    def __post_init__(self) -> None:
        _check_positive("--objective-ttft-ms", self.ttft_s)
        _check_positive("--objective-p99-ms", self.e2e_s)

    @property
    def has_limit(self) -> bool:
        """Return whether there is at least one limit."""
        return self.ttft_s is not None or self.e2e_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One open-loop run."""

    asks: tuple[Ask, ...]
    """Contents of the requests, used in order and repeated."""
    rate: float | None = None
    """Mean requests per second, with Poisson arrivals."""
    times_s: tuple[float, ...] | None = None
    """Instead of a rate: arrivals of a trace, ascending, one for each ask."""
    duration_s: float = 10.0
    """Seconds of counted load."""
    warmup_s: float = 0.0
    """Seconds of load before the counted ones, at the same rate; of a trace, its first seconds."""
    seed: int = 0
    """Seed of the arrivals; it gives the same arrivals for any number of processes."""
    target: str = DEFAULT_TARGET
    model: str = ""
    processes: int = 1
    connections: int = 1
    """Connections of each process."""
    max_outstanding: int = 10_000
    """Maximum concurrent calls of all processes; further arrivals are dropped and counted."""
    timeout_s: float = 30.0
    """Deadline of every call."""
    priority: Priority | None = None
    """None takes the server's default."""
    connection: Connection = field(default_factory=Connection)
    """Settings of the connections. Retries are ignored; a token must be a string or in a file."""
    is_streaming: bool = True
    is_multiplexed: bool = False
    """The requests of a connection share one call."""
    ignore_eos: bool = False
    """Answers have exactly max_new_tokens tokens."""
    check: bool = False
    """Compare the answers to equal asks."""
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        if not self.asks:
            raise PlanError("there is no text to send")
        if (self.rate is None) == (self.times_s is None):
            raise PlanError("give either a rate or a trace")
        if self.rate is not None and self.rate > _MAX_RATE:
            raise PlanError(f"--rate is {self.rate:g}; it must be at most {_MAX_RATE:,}, which no client reaches")
        for flag, value in (("--rate", self.rate), ("--duration", self.duration_s), ("--timeout-s", self.timeout_s)):
            _check_positive(flag, value)
        if not 0 <= self.warmup_s < math.inf:
            raise PlanError(f"--warmup is {self.warmup_s}; it must be 0 or more")
        for flag, number in (("--processes", self.processes), ("--connections", self.connections)):
            if not 1 <= number <= 256:
                raise PlanError(f"{flag} is {number}; it must be from 1 to 256")
        if self.max_outstanding < self.processes:
            raise PlanError(f"--max-outstanding is {self.max_outstanding}; it must be --processes or more")
        if self.objective.ttft_s is not None and not self.is_streaming:
            raise PlanError("--objective-ttft-ms needs streams: a unary answer has no separate first token")

    @property
    def end_s(self) -> float:
        """Return the end of the arrivals, in seconds since the start."""
        return self.warmup_s + self.duration_s


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"{flag} is {value}; it must be above 0")
