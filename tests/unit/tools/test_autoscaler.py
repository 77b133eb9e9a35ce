"""The autoscaler's algorithm, tested with the examples of Kubernetes' documentation."""

from __future__ import annotations

import itertools

import pytest

from antiphon.tools.capacity.autoscaler import (
    SYNC_PERIOD_S,
    Autoscaler,
    Policy,
    Rules,
    Scaling,
    desired_by_average,
    desired_by_ratio,
)

# "Algorithm details": 200m against 100m doubles, 50m against 100m halves; nothing happens within a tenth of 1.0.
RATIOS = [(4, 200, 100, 8), (4, 50, 100, 2), (4, 109, 100, 4), (4, 91, 100, 4), (4, 112, 100, 5), (3, 88, 100, 3)]
ANY = Rules(window_s=0, select="Max", policies=(Policy(kind="Percent", value=10_000, period_s=15),))


@pytest.mark.parametrize(("current", "value", "target", "expected"), RATIOS)
def test_desired_replicas_follow_the_documented_formula(
    current: int, value: float, target: float, expected: int
) -> None:
    assert desired_by_ratio(current, value, target) == expected
    assert desired_by_average(current, current * value, target) == expected


def test_scaling_down_is_limited_by_the_documented_policies() -> None:
    """80 replicas to 10 by at most 4 pods or 10 % a minute: 8, 8 (7.2 rounded up), ... and 4 at a time below 40."""
    policies = (Policy(kind="Pods", value=4, period_s=60), Policy(kind="Percent", value=10, period_s=60))
    down = Rules(window_s=0, select="Max", policies=policies)
    scaler = Autoscaler(Scaling(min_replicas=1, max_replicas=100, down=down))
    current, counts = 80, [80]
    for minute in range(1, 20):
        current = scaler.decide(60.0 * minute, current, [10])
        counts.append(current)
    assert counts[:4] == [80, 72, 64, 57]
    steps = [before - after for before, after in itertools.pairwise(counts)]
    assert all(step == 4 for step, before in zip(steps, counts, strict=False) if 14 <= before <= 40)
    assert counts[-1] == 10


def test_policies_limit_changes_over_their_whole_period() -> None:
    """A policy limits the changes of one minute at any interval of the controller."""
    up = Rules(window_s=0, select="Max", policies=(Policy(kind="Pods", value=4, period_s=60),))
    scaler = Autoscaler(Scaling(min_replicas=1, max_replicas=100, up=up))
    current, at = 2, {}
    for tick in range(9):
        current = scaler.decide(tick * SYNC_PERIOD_S, current, [50])
        at[tick * SYNC_PERIOD_S] = current
    assert [at[0.0], at[45.0], at[60.0], at[105.0], at[120.0]] == [6, 6, 10, 10, 14]


def test_select_min_uses_the_policy_that_changes_least() -> None:
    policies = (Policy(kind="Pods", value=1, period_s=60), Policy(kind="Percent", value=50, period_s=60))
    slow = Rules(window_s=0, select="Min", policies=policies)
    assert Autoscaler(Scaling(min_replicas=1, max_replicas=99, up=slow, down=slow)).decide(0, 20, [99]) == 21
    assert Autoscaler(Scaling(min_replicas=1, max_replicas=99, up=slow, down=slow)).decide(0, 20, [1]) == 19


def test_disabled_direction_changes_nothing() -> None:
    none = Rules(window_s=0, select="Disabled", policies=())
    assert Autoscaler(Scaling(min_replicas=1, max_replicas=9, down=none)).decide(0, 5, [1]) == 5


def test_stabilised_scaling_down_follows_the_largest_recommendation_in_the_window() -> None:
    """A dip shorter than the window has no effect; a longer one has, after the window."""
    down = Rules(window_s=300, select="Max", policies=ANY.policies)
    scaler = Autoscaler(Scaling(min_replicas=1, max_replicas=20, up=ANY, down=down))
    current, counts = 10, {}
    for tick in range(60):
        now_s = tick * SYNC_PERIOD_S
        wanted = 10 if now_s in (0.0, 150.0) else 2
        counts[now_s] = current = scaler.decide(now_s, current, [wanted])
    assert {counts[time_s] for time_s in counts if time_s < 450} == {10}
    assert counts[450.0] == 2


def test_metric_with_the_largest_recommendation_decides_within_the_bounds() -> None:
    scaler = Autoscaler(Scaling(min_replicas=2, max_replicas=6, up=ANY, down=ANY))
    assert scaler.decide(0, 3, [1, 5]) == 5
    assert scaler.decide(15, 5, [9, 1]) == 6
    assert scaler.decide(30, 6, [0, 1]) == 2
