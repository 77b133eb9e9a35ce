"""Results of a run: a record of every request, and the counts, rates and percentiles that follow from it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from antiphon.load.plan import Plan
from antiphon.load.workload import arrivals_of

OK = "OK"
UNFINISHED = "UNFINISHED"
"""Status of calls that still ran when the run ended."""
INCOMPLETE = "INCOMPLETE"
"""Status of calls that ended with OK before the end of every output, which is an error of the server."""

MAX_ERROR_SHARE = 0.01
"""A rate with at least this share of failed requests is not sustainable."""
MAX_LAG_MS = 10.0
"""Limit of the 99th percentile of the client's delay. A slower client measures itself."""

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
    """Result of one call. Times are seconds since the run's start."""

    scheduled_s: float
    sent_s: float
    last_s: float
    outcome: Outcome
    first_s: float | None = None
    """First message; None if there was none."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between messages."""
    num_tokens: int = 0
    """Target tokens, end tokens included."""
    text: str | None = None
    """Text of all outputs, if it is kept."""
    message: str | None = None
    """Message of an error."""


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
    """Replies of one process as columns, in order of their ends, with 8 bytes per figure.

    Times are seconds since the run's start. The columns do not contain requests of the warm-up.
    """

    scheduled_s: array[float] = field(default_factory=_floats)
    sent_s: array[float] = field(default_factory=_floats)
    first_s: array[float] = field(default_factory=_floats)
    """First message of a reply; nan if there was none."""
    last_s: array[float] = field(default_factory=_floats)
    outcome: array[int] = field(default_factory=_counts)
    """Index in `outcomes`."""
    num_tokens: array[int] = field(default_factory=_counts)
    gap_s: array[float] = field(default_factory=_floats)
    """Times between messages, of all good replies."""
    dropped_s: array[float] = field(default_factory=_floats)
    """Scheduled times of dropped arrivals: too many calls were running, or the run had ended long before."""
    outcomes: list[Outcome] = field(default_factory=list)
    messages: dict[Outcome, str] = field(default_factory=dict)
    """One message for each kind of error."""
    num_warmup: int = 0
    """Requests of the warm-up."""
    answers: dict[int, str] = field(default_factory=dict)
    """First answer to each ask."""
    num_compared: int = 0
    """Answers that were compared with an earlier one."""
    num_mismatches: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    stopped_s: float | None = None
    """Time at which the run was stopped before its end."""

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


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run without its warm-up. Latencies count from the scheduled times, for completely answered requests only."""

    plan: Plan
    record: Record

    @property
    def num_scheduled(self) -> int:
        """Return the arrivals of the plan: sent, dropped, and those after an interrupt."""
        return sum(time_s >= self.plan.warmup_s for time_s in arrivals_of(self.plan))

    @property
    def num_sent(self) -> int:
        """Return the requests sent: num_ok, those in `errors`, and num_unfinished."""
        return len(self.record.outcome)

    @property
    def num_dropped(self) -> int:
        """Return the requests not sent: max_outstanding calls were running, or the client was far too late."""
        return sum(time_s >= self.plan.warmup_s for time_s in self.record.dropped_s)

    @property
    def num_ok(self) -> int:
        """Return the requests that were completely answered."""
        return self._count(lambda outcome: outcome.status == OK)

    @property
    def num_unfinished(self) -> int:
        """Return the requests that were running when the run was interrupted."""
        return self._count(lambda outcome: outcome.status == UNFINISHED)

    @property
    def num_pushbacks(self) -> int:
        """Return the refusals with a time for the next attempt."""
        return self._count(lambda outcome: outcome.has_pushback)

    @cached_property
    def errors(self) -> dict[str, int]:
        """Return failed requests by gRPC status; INCOMPLETE is OK without the end of the answer."""
        return self._by(lambda outcome: outcome.status)

    @cached_property
    def error_reasons(self) -> dict[str, int]:
        """Return failed requests by status and ErrorInfo reason, as RESOURCE_EXHAUSTED/QUEUE_FULL."""
        return self._by(lambda outcome: "/".join(filter(None, (outcome.status, outcome.reason))))

    @property
    def error_share(self) -> float:
        """Return the share of requests without a complete answer; 0 if there was no request."""
        num_due = self.num_sent + self.num_dropped
        return 1 - self.num_ok / num_due if num_due else 0.0

    @cached_property
    def ttft_ms(self) -> Percentiles | None:
        """Return the time to first token; None for unary calls."""
        return percentiles_ms(self._ttft_s)

    @cached_property
    def e2e_ms(self) -> Percentiles | None:
        """Return the time to the end of the answer."""
        return percentiles_ms(self._e2e_s)

    @cached_property
    def inter_token_ms(self) -> Percentiles | None:
        """Return the time between messages of one answer; a message can contain several tokens."""
        return percentiles_ms(self.record.gap_s)

    @cached_property
    def per_token_ms(self) -> Percentiles | None:
        """Return the time from an answer's first token to its last, divided by the tokens after the first."""
        return percentiles_ms(self._per_token_s)

    @cached_property
    def lag_ms(self) -> Percentiles | None:
        """Return the delay between scheduled and actual sending."""
        record = self.record
        return percentiles_ms([sent - due for sent, due in zip(record.sent_s, record.scheduled_s, strict=True)])

    @property
    def window_s(self) -> float:
        """Return the seconds in which requests were scheduled."""
        stopped_s = self.record.stopped_s
        end_s = self.plan.end_s if stopped_s is None else min(stopped_s, self.plan.end_s)
        return max(end_s - self.plan.warmup_s, 0.0)

    @property
    def sent_per_s(self) -> float:
        """Return the achieved rate."""
        return _ratio(self.num_sent, self.window_s)

    @cached_property
    def busy_s(self) -> float:
        """Return seconds from the start of the window to its end or the last good answer, whichever is later."""
        last_s = max((self.record.last_s[row] for row in self._good_rows), default=0.0)
        return max(self.window_s, last_s - self.plan.warmup_s)

    @property
    def ok_per_s(self) -> float:
        """Return complete answers per second."""
        return _ratio(self.num_ok, self.busy_s)

    @property
    def tokens_per_s(self) -> float:
        """Return target tokens of good answers per second, end tokens included."""
        return _ratio(sum(self.record.num_tokens[row] for row in self._good_rows), self.busy_s)

    @property
    def goodput_per_s(self) -> float | None:
        """Return answers within the objective per second of the window; None without an objective."""
        objective = self.plan.objective
        if not objective.has_limit:
            return None
        record, num_good = self.record, 0
        for row in self._good_rows:
            due_s = record.scheduled_s[row]
            is_in_time = objective.e2e_s is None or record.last_s[row] - due_s <= objective.e2e_s
            # first_s of a unary answer is nan, and a comparison with nan is false.
            is_prompt = objective.ttft_s is None or record.first_s[row] - due_s <= objective.ttft_s
            num_good += is_in_time and is_prompt
        return _ratio(num_good, self.window_s)

    @property
    def has_met_objective(self) -> bool:
        """Return whether fewer than 1 % failed and the 99th latency are within the objective, if there is one."""
        bounds = ((self.plan.objective.ttft_s, self.ttft_ms), (self.plan.objective.e2e_s, self.e2e_ms))
        return self.error_share < MAX_ERROR_SHARE and all(
            bound_s is None or (latency is not None and latency.p99 <= 1e3 * bound_s) for bound_s, latency in bounds
        )

    @property
    def has_kept_up(self) -> bool:
        """Return whether the client sent every request on time."""
        return not self.num_dropped and (self.lag_ms is None or self.lag_ms.p99 <= MAX_LAG_MS)

    @property
    def is_interrupted(self) -> bool:
        """Return whether the run was stopped before its end."""
        return self.record.stopped_s is not None

    @cached_property
    def _good_rows(self) -> list[int]:
        good = {index for index, outcome in enumerate(self.record.outcomes) if outcome.status == OK}
        return [row for row, outcome in enumerate(self.record.outcome) if outcome in good]

    @property
    def _ttft_s(self) -> list[float]:
        record = self.record
        if not self.plan.is_streaming:
            return []
        return [record.first_s[row] - record.scheduled_s[row] for row in self._good_rows]

    @property
    def _e2e_s(self) -> list[float]:
        record = self.record
        return [record.last_s[row] - record.scheduled_s[row] for row in self._good_rows]

    @property
    def _per_token_s(self) -> list[float]:
        record = self.record
        if not self.plan.is_streaming:
            return []
        return [
            (record.last_s[row] - record.first_s[row]) / (record.num_tokens[row] - 1)
            for row in self._good_rows
            if record.num_tokens[row] > 1
        ]

    @cached_property
    def _counts(self) -> list[tuple[Outcome, int]]:
        counts = Counter(self.record.outcome)
        return [(outcome, counts[index]) for index, outcome in enumerate(self.record.outcomes)]

    def _count(self, is_meant: Callable[[Outcome], bool]) -> int:
        return sum(count for outcome, count in self._counts if is_meant(outcome))

    def _by(self, key: Callable[[Outcome], str]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for outcome, count in self._failures():
            counts[key(outcome)] += count
        return dict(sorted(counts.items()))

    def _failures(self) -> Iterator[tuple[Outcome, int]]:
        return ((outcome, count) for outcome, count in self._counts if outcome.status not in (OK, UNFINISHED))


def _ratio(number: float, seconds: float) -> float:
    return number / seconds if seconds else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    return _nearest_rank(sorted(values), percent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Percentiles of values, in milliseconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


def percentiles_ms(seconds: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of times in seconds; None if there are no times."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p95, p99, p99_9 = (1e3 * _nearest_rank(ordered, percent) for percent in (50, 90, 95, 99, 99.9))
    return Percentiles(p50=p50, p90=p90, p95=p95, p99=p99, p99_9=p99_9, max=1e3 * ordered[-1])


def _nearest_rank(ordered: Sequence[float], percent: float) -> float:
    # 99.9 is not a binary fraction: without rounding, 99.9 % of 41,000 values would be more than 40,959 of them.
    rank = math.ceil(round(len(ordered) * percent / 100, 9))
    return ordered[max(rank, 1) - 1]
