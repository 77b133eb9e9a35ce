"""Arrival times, percentiles and the search for a rate: pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.load.drive import bracketed_rate, highest_rate
from antiphon.load.plan import Ask, Plan
from antiphon.load.results import percentile, percentiles_ms
from antiphon.load.workload import arrivals_of, poisson_arrivals, share_of

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
