from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from antiphon.observability.families import CountedHistogram

BOUNDS = (0.001, 0.01, 0.5, 2.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0005, 0.001, 0.002, 0.5, 1.0, 2.0, 9.0]),
            st.integers(1, 5),
            st.sampled_from(["one", "two"]),
        ),
        max_size=30,
    )
)
def test_counted_histogram_is_exported_like_a_histogram_of_prometheus_client(
    observations: list[tuple[float, int, str]],
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=BOUNDS, registry=ours)
    plain = Histogram("gap_seconds", "Gaps.", ["model"], buckets=BOUNDS, registry=theirs)
    children = {name: (counted.labels(name), plain.labels(name)) for name in ("one", "two")}
    for value, count, name in observations:
        counted_child, plain_child = children[name]
        counted_child.observe(value, count)
        for _ in range(count):
            plain_child.observe(value)
    ours_lines, theirs_lines = (generate_latest(registry).decode().splitlines() for registry in (ours, theirs))
    kept = [line for line in theirs_lines if "_created" not in line]
    assert [line for line in ours_lines if "_sum" not in line] == [line for line in kept if "_sum" not in line]
    for name in children:
        expected = theirs.get_sample_value("gap_seconds_sum", {"model": name})
        assert ours.get_sample_value("gap_seconds_sum", {"model": name}) == pytest.approx(expected)


def test_counted_histogram_forgets_the_observations_of_a_removed_label() -> None:
    registry = CollectorRegistry()
    counted = CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=BOUNDS, registry=registry)
    for name in ("one", "two"):
        counted.labels(name).observe(0.1)
    counted.remove_by_labels({"model": "one"})
    assert registry.get_sample_value("gap_seconds_count", {"model": "one"}) is None
    assert registry.get_sample_value("gap_seconds_count", {"model": "two"}) == 1


def test_counted_histogram_refuses_buckets_that_do_not_increase() -> None:
    with pytest.raises(ValueError, match="gap_seconds"):
        CountedHistogram("gap_seconds", "Gaps.", label="model", buckets=(1.0, 1.0), registry=CollectorRegistry())
