"""Results of replies: counts that add up, and figures computed from them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.load.plan import Ask, Objective, Plan, PlanError
from antiphon.load.report import as_json, as_text, curve, warnings
from antiphon.load.results import INCOMPLETE, OK, UNFINISHED, Outcome, Record, Reply, Result

ASKS = (Ask(source="How are you?"), Ask(source="Stop!"))
FULL = Outcome("RESOURCE_EXHAUSTED", "QUEUE_FULL", has_pushback=True)
OUTCOMES = [Outcome(OK), FULL, Outcome("DEADLINE_EXCEEDED"), Outcome(UNFINISHED), Outcome(INCOMPLETE)]
REPLIES = st.lists(st.tuples(st.sampled_from(OUTCOMES), st.floats(0, 9), st.floats(0, 2)), max_size=40)


def reply(outcome: Outcome = OUTCOMES[0], due_s: float = 0.0, wait_s: float = 0.2, **given: float) -> Reply:
    held = {"sent_s": due_s, "first_s": due_s + wait_s / 2, "last_s": due_s + wait_s} | given
    return Reply(scheduled_s=due_s, outcome=outcome, num_tokens=5, **held)  # type: ignore[arg-type]


def result_of(replies: Sequence[Reply], objective: Objective | None = None, **changes: object) -> Result:
    record = Record()
    for held in replies:
        record.add(held)
    given = {"rate": 10.0, "duration_s": 10.0, "objective": objective or Objective()} | changes
    return Result(plan=Plan(asks=ASKS, **given), record=record)  # type: ignore[arg-type]


@given(drawn=REPLIES)
def test_everything_sent_is_ok_or_failed_or_unfinished(drawn: list[tuple[Outcome, float, float]]) -> None:
    result = result_of([reply(outcome, due_s, wait_s) for outcome, due_s, wait_s in drawn])
    assert result.num_sent == len(drawn) == result.num_ok + sum(result.errors.values()) + result.num_unfinished
    assert sum(result.errors.values()) == sum(result.error_reasons.values())
    assert result.num_pushbacks == result.error_reasons.get("RESOURCE_EXHAUSTED/QUEUE_FULL", 0)
    assert result.error_share == pytest.approx(1 - result.num_ok / len(drawn) if drawn else 0)


@given(drawn=REPLIES, split=st.integers(0, 40))
def test_records_of_processes_are_summed(drawn: list[tuple[Outcome, float, float]], split: int) -> None:
    replies = [reply(outcome, due_s, wait_s) for outcome, due_s, wait_s in drawn]
    whole = result_of(replies)
    parts = [result_of(replies[:split]).record, result_of(replies[split:]).record]
    together = Record()
    for part in parts:
        together.merge(part)
    assert as_json(Result(plan=whole.plan, record=together)) == as_json(whole)


def test_latencies_count_from_the_scheduled_time_and_only_for_answered_requests() -> None:
    late = reply(due_s=1.0, sent_s=1.5, first_s=1.6, last_s=2.0)
    result = result_of([late, reply(FULL, due_s=1.0, last_s=9.0)])
    assert result.ttft_ms is not None
    assert result.ttft_ms.max == pytest.approx(600)
    assert result.e2e_ms is not None
    assert result.e2e_ms.max == pytest.approx(1000)
    assert result.per_token_ms is not None
    assert result.per_token_ms.max == pytest.approx(100)  # 0.4 s for the four tokens after the first
    assert result.lag_ms is not None
    assert result.lag_ms.max == pytest.approx(500)


def test_goodput_counts_answers_within_the_objective_over_the_window() -> None:
    waits = [0.1, 0.2, 0.3, 0.4]
    replies = [reply(due_s=index, wait_s=wait_s) for index, wait_s in enumerate(waits)]
    replies.append(reply(FULL, due_s=5, wait_s=0.01))
    assert result_of(replies).goodput_per_s is None
    assert result_of(replies, Objective(e2e_s=0.25)).goodput_per_s == pytest.approx(2 / 10)
    assert result_of(replies, Objective(ttft_s=0.16)).goodput_per_s == pytest.approx(3 / 10)
    assert result_of(replies, Objective(ttft_s=0.16, e2e_s=0.15)).goodput_per_s == pytest.approx(1 / 10)


def test_throughput_is_over_the_time_until_the_last_answer() -> None:
    result = result_of([reply(due_s=0), reply(due_s=10, wait_s=2)], warmup_s=2.0)
    assert result.busy_s == pytest.approx(10)
    assert result_of([reply(due_s=0), reply(due_s=11, wait_s=4)], warmup_s=2.0).busy_s == pytest.approx(13)
    assert result.ok_per_s == pytest.approx(0.2)
    assert result.tokens_per_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("failed", "wait_s", "has_met"), [(0, 0.2, True), (1, 0.2, True), (2, 0.2, False), (0, 0.26, False)]
)
def test_objective_is_met_when_p99_is_within_it_and_fewer_than_one_percent_fail(
    failed: int, wait_s: float, has_met: bool
) -> None:
    replies = [reply(wait_s=wait_s) for _ in range(199 - failed)] + [reply(FULL)] * failed
    assert result_of(replies, Objective(e2e_s=0.25)).has_met_objective is has_met


def test_objective_is_not_met_when_nothing_was_answered() -> None:
    assert not result_of([], Objective(e2e_s=0.25)).has_met_objective


def test_result_warns_when_the_client_was_late_or_dropped_requests() -> None:
    on_time = result_of([reply()] * 100)
    assert on_time.has_kept_up
    assert not warnings(on_time)
    late = result_of([reply(sent_s=0.02)] * 2 + [reply()] * 98)
    assert not late.has_kept_up
    assert "20 ms late" in warnings(late)[0]
    dropping = result_of([reply()], max_outstanding=7)
    dropping.record.dropped_s.append(1.0)
    assert not dropping.has_kept_up
    assert "1 requests were not sent: --max-outstanding 7" in warnings(dropping)[0]
    assert dropping.error_share == 0.5


def test_stopped_run_counts_the_time_until_the_stop() -> None:
    result = result_of([reply()] * 20)
    result.record.stopped_s = 4.0
    assert (result.window_s, result.sent_per_s, result.is_interrupted) == (4.0, 5.0, True)


def test_different_answers_to_equal_requests_are_detected_in_and_across_processes() -> None:
    ours, theirs = Record(), Record()
    for text in ("Wie geht es dir?", "Wie geht es dir?", "Wie geht's?"):
        ours.compare(0, text)
    assert (ours.num_compared, ours.num_mismatches) == (2, 1)
    theirs.compare(0, "Wie geht es Ihnen?")
    theirs.compare(0, "Wie geht es dir?")
    theirs.compare(1, "Halt!")
    ours.merge(theirs)
    assert (ours.num_compared, ours.num_mismatches) == (4, 3)
    text = as_text(Result(plan=Plan(asks=ASKS, rate=1, check=True), record=ours))
    assert "3 of 4 answers differ" in text
    assert "'Wie geht es Ihnen?'" in text


def test_json_contains_every_figure() -> None:
    figures = json.loads(json.dumps(as_json(result_of([reply(), reply(FULL)], Objective(e2e_s=0.25)))))
    assert {"sent": 2, "ok": 1, "errors": {"RESOURCE_EXHAUSTED": 1}, "with_pushback": 1}.items() <= figures.items()
    for name in ("ttft_ms", "e2e_ms", "per_token_ms", "lag_ms"):
        assert figures[name].keys() == {"p50", "p90", "p95", "p99", "p99_9", "max"}
    assert figures["objective"] == {"ttft_s": None, "e2e_s": 0.25, "met": False}
    assert figures["goodput_per_second"] == pytest.approx(0.1)


def test_text_contains_each_kind_of_error_with_a_message() -> None:
    refused = reply(FULL)
    refused.message = "2 requests wait; try again in 50 ms"
    text = as_text(result_of([reply(), refused, refused]))
    assert "sent 3, ok 1, failed 2" in text
    assert "2 RESOURCE_EXHAUSTED/QUEUE_FULL: 2 requests wait; try again in 50 ms" in text


def test_curve_has_a_line_for_each_run_lowest_rate_first() -> None:
    results = [result_of([reply()], rate=rate) for rate in (400.0, 50.0, 100.0)]
    assert [line.split()[0] for line in curve(results).splitlines()[1:]] == ["50.0", "100.0", "400.0"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"asks": ()}, "no text to send"),
        ({"rate": 0.0}, "--rate is 0.0"),
        ({"rate": 1e9}, "--rate is 1e+09; it must be at most 100,000"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"times_s": (0.0,)}, "either a rate or a trace"),
        ({"duration_s": 0.0}, "--duration is 0.0"),
        ({"warmup_s": -1.0}, "--warmup is -1.0"),
        ({"timeout_s": float("inf")}, "--timeout-s is inf"),
        ({"processes": 0}, "--processes is 0"),
        ({"connections": 257}, "--connections is 257"),
        ({"processes": 4, "max_outstanding": 3}, "--max-outstanding is 3"),
        ({"is_streaming": False, "objective": Objective(ttft_s=0.1)}, "--objective-ttft-ms needs streams"),
    ],
)
def test_invalid_plan_is_refused_by_name(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**{"asks": ASKS, "rate": 10.0, **changes})  # type: ignore[arg-type]
    assert problem in str(caught.value)
