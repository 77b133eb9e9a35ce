"""Traces, arrival times, and results of replies: counts that add up, and figures computed from them."""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.load.drive import bracketed_rate, highest_rate
from antiphon.load.plan import Ask, Objective, Plan, PlanError
from antiphon.load.report import as_json, as_text, curve, warnings
from antiphon.load.results import INCOMPLETE, OK, UNFINISHED, Outcome, Record, Reply, Result, percentile, percentiles_ms
from antiphon.load.workload import Entry, arrivals_of, poisson_arrivals, read_trace, share_of

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
def test_objective_is_met_when_p99_is_within_it_and_few_fail(failed: int, wait_s: float, has_met: bool) -> None:
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


SECONDS = st.lists(st.floats(0, 100), min_size=1, max_size=300)


@given(values=SECONDS, percent=st.sampled_from([0, 1, 50, 75, 90, 95, 99, 99.9, 100]))
def test_percentile_is_the_nearest_rank(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def test_percentile_of_many_values_has_no_rounding_error() -> None:
    assert percentile(range(1, 41_001), 99.9) == 40_959  # 41,000 * 99.9 / 100 is a little more than that in binary


@given(values=SECONDS)
def test_spread_is_in_milliseconds_and_never_decreases(values: list[float]) -> None:
    spread = percentiles_ms(values)
    assert spread is not None
    held = list(asdict(spread).values())
    assert held == sorted(held)
    assert spread.max == 1e3 * max(values)
    assert spread.p99_9 == 1e3 * percentile(values, 99.9)


def test_spread_of_nothing_is_absent() -> None:
    assert percentiles_ms([]) is None


def test_arrivals_have_the_requested_rate_and_depend_only_on_the_seed() -> None:
    arrivals = poisson_arrivals(50, 100, seed=1)
    assert arrivals == sorted(arrivals) == poisson_arrivals(50, 100, seed=1)
    assert arrivals != poisson_arrivals(50, 100, seed=2)
    assert 0 < arrivals[0] < arrivals[-1] < 100
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert len(poisson_arrivals(0.001, 1, seed=1)) == 1


def test_intervals_between_arrivals_are_exponential() -> None:
    arrivals = poisson_arrivals(200, 100, seed=3)
    intervals = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    # An exponential's standard deviation is its mean, and a share 1 - 1/e of it lies below the mean.
    mean = statistics.mean(intervals)
    assert statistics.stdev(intervals) == pytest.approx(mean, rel=0.05)
    assert sum(interval < mean for interval in intervals) / len(intervals) == pytest.approx(1 - 1 / math.e, abs=0.02)


@given(processes=st.integers(1, 9), num_asks=st.integers(1, 7), seed=st.integers(0, 99))
def test_processes_together_have_exactly_the_arrivals_of_the_plan(processes: int, num_asks: int, seed: int) -> None:
    plan = Plan(asks=(Ask(source="x"),) * num_asks, rate=30, duration_s=3, seed=seed, processes=processes)
    shares = [list(share_of(plan, process)) for process in range(processes)]
    together = sorted(arrival for share in shares for arrival in share)
    assert [time_s for time_s, _ in together] == list(arrivals_of(plan)) == poisson_arrivals(30, 3, seed)
    assert [ask for _, ask in together] == [index % num_asks for index in range(len(together))]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_trace_is_replayed_unchanged_until_the_run_ends() -> None:
    asks = tuple(Ask(source=text) for text in "abcd")
    plan = Plan(asks=asks, times_s=(0.0, 0.5, 0.5, 2.0), warmup_s=0.25, duration_s=1.0)
    assert list(share_of(plan, 0)) == [(0.0, 0), (0.5, 1), (0.5, 2)]


@given(limit=st.floats(1.5, 90.0))
def test_bisection_ends_just_below_the_limit(limit: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = highest_rate(holds, 1.0, 100.0, steps=8)
    assert len(tried) == 8
    assert limit / 1.02 <= found <= limit


def test_bisection_returns_zero_when_no_rate_holds() -> None:
    assert highest_rate(lambda rate: False, 1.0, 100.0, steps=4) == 0.0


@given(limit=st.floats(0.1, 10_000), start=st.floats(1, 1000))
def test_search_finds_the_limit_from_any_start(limit: float, start: float) -> None:
    found = bracketed_rate(lambda rate: rate <= limit, start, precision=0.05)
    assert limit / 1.0500001 <= found <= limit


def test_search_returns_zero_when_no_rate_holds_and_its_maximum_when_all_do() -> None:
    assert bracketed_rate(lambda rate: False, 10, precision=0.05) == 0.0
    assert bracketed_rate(lambda rate: True, 10, precision=0.05) > 10_000


def test_search_result_is_below_and_close_to_the_capacity_of_a_queue() -> None:
    """A server that needs 5 ms per request can answer 200 per second."""
    capacity, bound_s = 200.0, 0.25

    def holds(rate: float) -> bool:
        return percentile(_waits(poisson_arrivals(rate, 30, seed=1), 1 / capacity), 99) <= bound_s

    found = bracketed_rate(holds, 10, precision=0.05)
    assert holds(found)
    assert 0.8 * capacity < found < capacity


def _waits(arrivals: Sequence[float], service_s: float) -> list[float]:
    """Return the latency of each arrival at a server that handles one request at a time."""
    free_s, waits = 0.0, []
    for arrival_s in arrivals:
        free_s = max(free_s, arrival_s) + service_s
        waits.append(free_s - arrival_s)
    return waits


def trace_of(folder: Path, text: str) -> list[Entry]:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


ENTRIES = [
    Entry(time_s=0.0, source_tokens=12, max_new_tokens=20),
    Entry(time_s=0.25, text='Is "this, here" a trace?'),
    Entry(time_s=2.5, source_tokens=3),
]


def test_json_lines_and_csv_give_the_same_trace(tmp_path: Path) -> None:
    json_lines = (
        '{"time_s": 7.5, "source_tokens": 12, "max_new_tokens": 20}\n\n'
        '{"time_s": 7.75, "text": "Is \\"this, here\\" a trace?"}\n'
        '{"time_s": 10, "source_tokens": 3}\n'
    )
    table = (
        "max_new_tokens,time_s,source_tokens,text\n"
        '20,7.5,12,\n,7.75,,"Is ""this, here"" a trace?"\n,10,3,\n'
    )  # fmt: skip
    assert trace_of(tmp_path, json_lines) == trace_of(tmp_path, table) == ENTRIES


def test_entries_are_sorted_by_time_and_start_at_zero(tmp_path: Path) -> None:
    lines = ['{"time_s": 1700000003, "text": "b"}', '{"time_s": 1700000001, "text": "a"}']
    assert trace_of(tmp_path, "\n".join(lines)) == [Entry(time_s=0.0, text="a"), Entry(time_s=2.0, text="b")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither JSON lines nor CSV"),
        ("time_s,text\n", "holds no request"),
        ("when,text\n1,a\n", "neither JSON lines nor CSV whose header names time_s"),
        ('{"time_s": 1, "text": "a"}\n{"time_s"', "line 2: not JSON"),
        ('{"time_s": 1, "text": "a"}\n[1]', "line 2: not a JSON object"),
        ('{"time_s": 1}', "line 1: give either text or source_tokens"),
        ('{"time_s": 1, "text": "a", "source_tokens": 3}', "line 1: give either text or source_tokens"),
        ('{"time_s": 1, "text": 5}', "line 1: text is 5"),
        ('{"text": "a"}', "line 1: time_s is None"),
        ('{"time_s": NaN, "text": "a"}', "line 1: time_s is nan"),
        ('{"time_s": "soon", "text": "a"}', "line 1: time_s is 'soon'"),
        ('{"time_s": 1, "source_tokens": 0}', "line 1: source_tokens is 0"),
        ('{"time_s": 1, "source_tokens": 2.5}', "line 1: source_tokens is 2.5"),
        ("time_s,source_tokens,max_new_tokens\n1,2,x\n", "line 2: max_new_tokens is 'x'"),
        ('{"time_s": 1, "text": "a", "output_tokens": 3}', "line 1: unknown field output_tokens"),
    ],
)
def test_invalid_trace_is_refused_by_line_and_field(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        trace_of(tmp_path, text)
    assert str(caught.value).startswith(f"--trace {tmp_path / 'trace'}")
    assert problem in str(caught.value)


def test_unreadable_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--trace .*absent cannot be read"):
        read_trace(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"--trace .*latin cannot be read"):
        read_trace(tmp_path / "latin")
