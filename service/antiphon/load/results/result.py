"""Result of a run: counts, rates, percentiles, and the check of its objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from antiphon.load.calls.record import OK, UNFINISHED, Outcome, Record
from antiphon.load.plan import Plan
from antiphon.load.results.percentiles import Spread, spread_ms
from antiphon.load.workload.schedule import arrivals_of

MAX_ERROR_SHARE = 0.01
"""A rate with at least this share of failed requests is not sustainable."""
MAX_LAG_MS = 10.0
"""Limit of the 99th percentile of the client's delay. A slower client measures itself."""


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
    def ttft_ms(self) -> Spread | None:
        """Return the time to first token; None for unary calls."""
        return spread_ms(self._ttft_s)

    @cached_property
    def e2e_ms(self) -> Spread | None:
        """Return the time to the end of the answer."""
        return spread_ms(self._e2e_s)

    @cached_property
    def inter_token_ms(self) -> Spread | None:
        """Return the time between messages of one answer; a message can contain several tokens."""
        return spread_ms(self.record.gap_s)

    @cached_property
    def per_token_ms(self) -> Spread | None:
        """Return the time from an answer's first token to its last, divided by the tokens after the first."""
        return spread_ms(self._per_token_s)

    @cached_property
    def lag_ms(self) -> Spread | None:
        """Return the delay between scheduled and actual sending."""
        record = self.record
        return spread_ms([sent - due for sent, due in zip(record.sent_s, record.scheduled_s, strict=True)])

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
        if not objective.is_given:
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
        """Return whether fewer than 1 % failed and the 99th percentiles are within the objective, if there is one."""
        bounds = ((self.plan.objective.ttft_s, self.ttft_ms), (self.plan.objective.e2e_s, self.e2e_ms))
        return self.error_share < MAX_ERROR_SHARE and all(
            bound_s is None or (spread is not None and spread.p99 <= 1e3 * bound_s) for bound_s, spread in bounds
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
        together: Counter[str] = Counter()
        for outcome, count in self._failures():
            together[key(outcome)] += count
        return dict(sorted(together.items()))

    def _failures(self) -> Iterator[tuple[Outcome, int]]:
        return ((outcome, count) for outcome, count in self._counts if outcome.status not in (OK, UNFINISHED))


def _ratio(number: float, seconds: float) -> float:
    return number / seconds if seconds else 0.0
