"""What a load test is to do: plain data, validated, sent as it is to every client process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from antiphon.client import DEFAULT_TARGET, Connection, Priority

_MAX_RATE = 100_000


class PlanError(ValueError):
    """A load test cannot be run as it is described; the message names the flag, the value and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What one request asks for: a text, or token ids. max_new_tokens: None leaves it to the model."""

    source: str | tuple[int, ...]
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What counts as a good answer: seconds from its scheduled arrival to its first token and to its end, at most.

    A run meets the objective where 99 % of its answers do, one bound at a time. None: no bound.
    """

    ttft_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        _check_positive("--objective-ttft-ms", self.ttft_s)
        _check_positive("--objective-p99-ms", self.e2e_s)

    @property
    def is_given(self) -> bool:
        """Whether there is a bound at all."""
        return self.ttft_s is not None or self.e2e_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One open-loop run.

    asks: what is asked, in order, over and over.
    rate: requests a second on average, at Poisson arrivals. times_s: arrivals of a trace instead, ascending, one for
    each ask.
    warmup_s: so many seconds of load come before what is counted, at the same rate; of a trace, its first ones.
    duration_s: seconds of load that are counted.
    seed: of arrivals; the same seed gives the same ones, however many processes share them.
    connections: of each process. max_outstanding: calls under way at once, over all processes; an arrival beyond is
    dropped, and counted. timeout_s: the deadline of every call. priority: None is the server's own.
    connection: how a server is reached; its retries are left out, and its token is a string or in a file.
    ignore_eos: answers are as long as max_new_tokens says. check: equal asks must be answered equally.
    """

    asks: tuple[Ask, ...]
    rate: float | None = None
    times_s: tuple[float, ...] | None = None
    duration_s: float = 10.0
    warmup_s: float = 0.0
    seed: int = 0
    target: str = DEFAULT_TARGET
    model: str = ""
    processes: int = 1
    connections: int = 1
    max_outstanding: int = 10_000
    timeout_s: float = 30.0
    priority: Priority | None = None
    connection: Connection = field(default_factory=Connection)
    is_streaming: bool = True
    ignore_eos: bool = False
    check: bool = False
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        if not self.asks:
            raise PlanError("there is nothing to ask")
        if (self.rate is None) == (self.times_s is None):
            raise PlanError("arrivals come either at a rate or from a trace")
        if self.rate is not None and self.rate > _MAX_RATE:
            raise PlanError(f"--rate is {self.rate:g}; it must be {_MAX_RATE:,} at most, which no client reaches")
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
            raise PlanError("--objective-ttft-ms needs streams: a unary answer has no first token of its own")

    @property
    def end_s(self) -> float:
        """When the last request may come, seconds from the start."""
        return self.warmup_s + self.duration_s


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"{flag} is {value}; it must be above 0")
