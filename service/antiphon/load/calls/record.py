"""Results of the requests of one process. Keeps every sample in arrays with 8 bytes per figure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

OK = "OK"
UNFINISHED = "UNFINISHED"
"""Status of calls that still ran when the run ended."""
INCOMPLETE = "INCOMPLETE"
"""Status of calls that ended with OK before the end of every output, which is an error of the server."""

# Maximum number of different answers that are kept to be shown.
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a call. status: a gRPC status, UNFINISHED or INCOMPLETE. reason: of ErrorInfo, if there is one."""

    status: str
    reason: str | None = None
    has_pushback: bool = False


@dataclass(kw_only=True, slots=True)
class Reply:
    """Result of one call. Times are seconds since the run's start. first_s: first message; None if there was none.

    gaps_s: times between messages. num_tokens: includes end tokens. text: of all outputs, if it is kept.
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
    """Two different answers to one ask. ask: index of the ask in the plan."""

    ask: int
    first: str
    other: str


def _floats() -> array[float]:
    return array("d")


def _counts() -> array[int]:
    return array("L")


@dataclass(kw_only=True, slots=True)
class Record:
    """Replies as columns, in order of their ends. Times are seconds since the run's start.

    first_s: nan if there was no message. outcome: index in `outcomes`. gap_s: of all good replies.
    dropped_s: scheduled times of dropped arrivals: too many calls were running, or the run had ended long before.
    messages: one message for each kind of error. num_warmup: requests of the warm-up; the columns do not contain them.
    answers: first answer to each ask. num_compared: answers that were compared with an earlier one.
    stopped_s: time at which the run was stopped before its end.
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
        """Add one reply."""
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
        """Compare an answer with the first one to the same ask."""
        first = self.answers.get(ask)
        if first is None:
            self.answers[ask] = text
            return
        self.num_compared += 1
        if first != text:
            self.num_mismatches += 1
            self._show([Mismatch(ask, first, text)])

    def merge(self, other: Self) -> None:
        """Add the record of another process."""
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
        # There are few outcomes: statuses times reasons.
        if outcome not in self.outcomes:
            self.outcomes.append(outcome)
        return self.outcomes.index(outcome)
