"""What became of the requests of one process: every sample is kept, in arrays, 8 bytes for each figure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

OK = "OK"
UNFINISHED = "UNFINISHED"
"""Of calls that were still under way when the run was given up."""
INCOMPLETE = "INCOMPLETE"
"""Of calls that ended well without the end of every output, which no server may do."""

# Answers that differ are shown, not collected.
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. status: a gRPC status, UNFINISHED or INCOMPLETE. reason: of ErrorInfo, where there is one."""

    status: str
    reason: str | None = None
    has_pushback: bool = False


@dataclass(kw_only=True, slots=True)
class Reply:
    """One call, seconds from the run's start. first_s: of the first message; None where none came.

    gaps_s: between one message and the next. num_tokens: end tokens included. text: of all outputs, where it is kept.
    message: of an error.
    """

    scheduled_s: float
    sent_s: float
    last_s: float
    outcome: Outcome
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    text: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two answers to one ask, which of the plan's it was."""

    ask: int
    first: str
    other: str


def _floats() -> array[float]:
    return array("d")


def _counts() -> array[int]:
    return array("L")


@dataclass(kw_only=True, slots=True)
class Record:
    """Replies as columns in the order of their ends, times in seconds from the run's start.

    first_s: nan where no message came. outcome: index of `outcomes`. gap_s: of all replies that were good.
    dropped_s: scheduled times of arrivals that were given up, too many calls being under way or the run long over.
    messages: one of each kind of error. num_warmup: requests sent before anything was counted; no column holds them.
    answers: of each ask, the first answer seen. num_compared: answers that another was there to compare with.
    stopped_s: when the run was stopped before its end.
    """

    scheduled_s: array[float] = field(default_factory=_floats)
    sent_s: array[float] = field(default_factory=_floats)
    first_s: array[float] = field(default_factory=_floats)
    last_s: array[float] = field(default_factory=_floats)
    outcome: array[int] = field(default_factory=_counts)
    num_tokens: array[int] = field(default_factory=_counts)
    gap_s: array[float] = field(default_factory=_floats)
    dropped_s: array[float] = field(default_factory=_floats)
    outcomes: list[Outcome] = field(default_factory=list)
    messages: dict[Outcome, str] = field(default_factory=dict)
    num_warmup: int = 0
    answers: dict[int, str] = field(default_factory=dict)
    num_compared: int = 0
    num_mismatches: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    stopped_s: float | None = None

    def add(self, reply: Reply) -> None:
        """Take one reply in."""
        self.scheduled_s.append(reply.scheduled_s)
        self.sent_s.append(reply.sent_s)
        self.first_s.append(float("nan") if reply.first_s is None else reply.first_s)
        self.last_s.append(reply.last_s)
        self.outcome.append(self._index_of(reply.outcome))
        self.num_tokens.append(reply.num_tokens)
        if reply.message is not None:
            self.messages.setdefault(reply.outcome, reply.message)
        if reply.outcome.status == OK:
            self.gap_s.extend(reply.gaps_s)

    def compare(self, ask: int, text: str) -> None:
        """Hold an answer against the first one to the same ask."""
        first = self.answers.get(ask)
        if first is None:
            self.answers[ask] = text
            return
        self.num_compared += 1
        if first != text:
            self.num_mismatches += 1
            self._show([Mismatch(ask, first, text)])

    def merge(self, other: Self) -> None:
        """Take in all that another process recorded."""
        indices = [self._index_of(outcome) for outcome in other.outcomes]
        self.outcome.extend(indices[index] for index in other.outcome)
        for name in ("scheduled_s", "sent_s", "first_s", "last_s", "num_tokens", "gap_s", "dropped_s"):
            getattr(self, name).extend(getattr(other, name))
        self.messages = other.messages | self.messages
        self.num_warmup += other.num_warmup
        self.num_compared += other.num_compared
        self.num_mismatches += other.num_mismatches
        self._show(other.mismatches)
        for ask, text in other.answers.items():
            self.compare(ask, text)
        self.stopped_s = self.stopped_s if other.stopped_s is None else other.stopped_s

    def _show(self, mismatches: Iterable[Mismatch]) -> None:
        self.mismatches = [*self.mismatches, *mismatches][:_MAX_SHOWN]

    def _index_of(self, outcome: Outcome) -> int:
        # Outcomes are few: statuses times reasons.
        if outcome not in self.outcomes:
            self.outcomes.append(outcome)
        return self.outcomes.index(outcome)
