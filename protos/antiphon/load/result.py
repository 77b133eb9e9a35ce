"""What came of a run: counts, rates, percentiles, and whether it met its objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from antiphon.load.percentiles import Spread, spread_ms
from antiphon.load.plan import Plan
from antiphon.load.record import OK, UNFINISHED, Outcome, Record
from antiphon.load.schedule import arrivals_of

MAX_ERROR_SHARE = 0.01
"""From this share of failed requests on a rate is not sustainable."""
MAX_LAG_MS = 10.0
"""A client that sends its 99th percentile later than this measures itself."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run, its warm-up left out. Latencies count from the scheduled times, and only of requests answered in full."""

    plan: Plan
    record: Record

    @property
    def num_scheduled(self) -> int:
        """Arrivals of the plan: num_sent, num_dropped, and those an interrupted run never came to."""
        return sum(time_s >= self.plan.warmup_s for time_s in arrivals_of(self.plan))

    @property
    def num_sent(self) -> int:
        """Requests sent: num_ok, those of `errors` and num_unfinished together."""
        return len(self.record.outcome)

    @property
    def num_dropped(self) -> int:
        """Requests never sent: max_outstanding were under way, or the run was long over when the client got to them."""
        return sum(time_s >= self.plan.warmup_s for time_s in self.record.dropped_s)

    @property
    def num_ok(self) -> int:
        """Requests answered in full."""
        return self._count(lambda outcome: outcome.status == OK)

    @property
    def num_unfinished(self) -> int:
        """Requests under way when the run was interrupted."""
        return self._count(lambda outcome: outcome.status == UNFINISHED)

    @property
    def num_pushbacks(self) -> int:
        """Refusals that told the client when to try again."""
        return self._count(lambda outcome: outcome.has_pushback)

    @cached_property
    def errors(self) -> dict[str, int]:
        """Failed requests by gRPC status; INCOMPLETE is OK without the end of the answer."""
        return self._by(lambda outcome: outcome.status)

    @cached_property
    def error_reasons(self) -> dict[str, int]:
        """Failed requests by status and ErrorInfo reason, as RESOURCE_EXHAUSTED/QUEUE_FULL."""
        return self._by(lambda outcome: "/".join(filter(None, (outcome.status, outcome.reason))))

    @property
    def error_share(self) -> float:
        """Requests not answered in full, of all that came; 0 of none."""
        num_due = self.num_sent + self.num_dropped
        return 1 - self.num_ok / num_due if num_due else 0.0

    @cached_property
    def ttft_ms(self) -> Spread | None:
        """Time to first token; None of unary calls."""
        return spread_ms(self._ttft_s)

    @cached_property
    def e2e_ms(self) -> Spread | None:
        """Time to the end of the answer."""
        return spread_ms(self._e2e_s)

    @cached_property
    def inter_token_ms(self) -> Spread | None:
        """Time between messages of one answer: a server may put several tokens into one."""
        return spread_ms(self.record.gap_s)

    @cached_property
    def per_token_ms(self) -> Spread | None:
        """Time from an answer's first token to its last, over the tokens after the first."""
        return spread_ms(self._per_token_s)

    @cached_property
    def lag_ms(self) -> Spread | None:
        """How late requests were sent."""
        record = self.record
        return spread_ms([sent - due for sent, due in zip(record.sent_s, record.scheduled_s, strict=True)])

    @property
    def window_s(self) -> float:
        """Seconds in which requests were to come."""
        stopped_s = self.record.stopped_s
        end_s = self.plan.end_s if stopped_s is None else min(stopped_s, self.plan.end_s)
        return max(end_s - self.plan.warmup_s, 0.0)

    @property
    def sent_per_s(self) -> float:
        """The rate that was achieved."""
        return _ratio(self.num_sent, self.window_s)

    @cached_property
    def busy_s(self) -> float:
        """Seconds from the start of the window to its end or the last good answer, whichever is later."""
        last_s = max((self.record.last_s[row] for row in self._good_rows), default=0.0)
        return max(self.window_s, last_s - self.plan.warmup_s)

    @property
    def ok_per_s(self) -> float:
        """Answers a second."""
        return _ratio(self.num_ok, self.busy_s)

    @property
    def tokens_per_s(self) -> float:
        """Target tokens of good answers a second, end tokens included."""
        return _ratio(sum(self.record.num_tokens[row] for row in self._good_rows), self.busy_s)

    @property
    def goodput_per_s(self) -> float | None:
        """Answers within the objective, for each second in which requests were to come; None without an objective."""
        objective = self.plan.objective
        if not objective.is_given:
            return None
        record, num_good = self.record, 0
        for row in self._good_rows:
            due_s = record.scheduled_s[row]
            is_in_time = objective.e2e_s is None or record.last_s[row] - due_s <= objective.e2e_s
            # A comparison with nan is false: a unary answer has no first token of its own.
            is_prompt = objective.ttft_s is None or record.first_s[row] - due_s <= objective.ttft_s
            num_good += is_in_time and is_prompt
        return _ratio(num_good, self.window_s)

    @property
    def has_met_objective(self) -> bool:
        """Whether fewer than 1 % failed and the 99th percentiles are within the objective, where there is one."""
        bounds = ((self.plan.objective.ttft_s, self.ttft_ms), (self.plan.objective.e2e_s, self.e2e_ms))
        return self.error_share < MAX_ERROR_SHARE and all(
            bound_s is None or (spread is not None and spread.p99 <= 1e3 * bound_s) for bound_s, spread in bounds
        )

    @property
    def has_kept_up(self) -> bool:
        """Whether the client sent everything, and on time."""
        return not self.num_dropped and (self.lag_ms is None or self.lag_ms.p99 <= MAX_LAG_MS)

    @property
    def is_interrupted(self) -> bool:
        """Whether the run ended before its time."""
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
