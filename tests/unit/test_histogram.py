from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from antiphon.service.histogram import CountedHistogram

BOUNDS = (0.001, 0.01, 0.5, 2.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.5, 1.0, 2.0, 9.0]), st.integers(1, 5)), max_size=30
    )
)
def test_counted_histogram_renders_as_the_clients_own_does(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", buckets=BOUNDS, registry=ours)
    plain = Histogram("gap_seconds", "Gaps.", buckets=BOUNDS, registry=theirs)
    for value, count in observations:
        counted.observe(value, count)
        for _ in range(count):
            plain.observe(value)
    ours_lines, theirs_lines = (generate_latest(registry).decode().splitlines() for registry in (ours, theirs))
    kept = [line for line in theirs_lines if "_created" not in line]
    assert [line for line in ours_lines if "_sum" not in line] == [line for line in kept if "_sum" not in line]
    expected = theirs.get_sample_value("gap_seconds_sum")
    assert ours.get_sample_value("gap_seconds_sum") == pytest.approx(expected)


def test_counted_histogram_refuses_buckets_that_do_not_rise() -> None:
    with pytest.raises(ValueError, match="gap_seconds"):
        CountedHistogram("gap_seconds", "Gaps.", buckets=(1.0, 1.0), registry=CollectorRegistry())
