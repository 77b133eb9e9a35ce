"""`antiphon simulate`: it scales a fleet by the shipped ScaledObject with the algorithm of Kubernetes."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from antiphon.cli.main import main
from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.autoscaler import (
    SYNC_PERIOD_S,
    Autoscaler,
    Policy,
    Rules,
    ScaledObject,
    Scaling,
    Trigger,
    desired_by_average,
    desired_by_ratio,
    read_scaled_object,
)
from antiphon.tools.capacity.flags import CapacityError
from antiphon.tools.capacity.fleet import Environment, Fleet, Outcome
from antiphon.tools.capacity.simulated_replica import ServiceCurve, read_curve
from antiphon.tools.capacity.traffic import Burst, Traffic, day, read_traffic

SHIPPED = Path(__file__).parents[3] / "deploy" / "components" / "autoscaling" / "scaledobject.yaml"
CURVE = ServiceCurve(rows=(1, 4, 16), answers_per_s=(4.0, 10.0, 16.0), work=(0.5, 1.0, 1.5), origin="test")
LIMITS = EngineLimits(max_num_seqs=16, max_queued_requests=64)
AT_ONCE = Environment(start_s=20.0, discovery_s=0.0, cache_of_full_rows=1.0)


def _steady(rate: float, hours: float) -> Traffic:
    return Traffic(rates=np.full(math.ceil(60 * hours), rate), interval_s=60.0)


def _run(traffic: Traffic, triggers: tuple[Trigger, ...] | None, first: int) -> Outcome:
    scaled = None
    if triggers is not None:
        scaled = ScaledObject(scaling=Scaling(min_replicas=1, max_replicas=20), triggers=triggers)
    return Fleet(CURVE, LIMITS, AT_ONCE, scaled).run(traffic, first, seed=1)


def test_shipped_scaled_object_is_read_field_by_field() -> None:
    spec = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))["spec"]
    read = read_scaled_object(SHIPPED)
    assert (read.scaling.min_replicas, read.scaling.max_replicas) == (spec["minReplicaCount"], spec["maxReplicaCount"])
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    for name, rules in (("scaleUp", read.scaling.up), ("scaleDown", read.scaling.down)):
        assert rules.window_s == behavior[name]["stabilizationWindowSeconds"]
        assert rules.select == behavior[name]["selectPolicy"]
        assert rules.policies == tuple(
            Policy(kind=one["type"], value=one["value"], period_s=one["periodSeconds"])
            for one in behavior[name]["policies"]
        )
    targets = {trigger.metric: trigger.target for trigger in read.triggers}
    assert targets == {one["name"]: float(one["metadata"]["threshold"]) for one in spec["triggers"]}


def test_every_request_is_counted_and_replica_seconds_add_up() -> None:
    traffic = _steady(20.0, 1.0)
    static = _run(traffic, None, 3)
    expected = 20.0 * traffic.duration_s
    came = len(static.answers.latency_s) + len(static.answers.refused_s)
    came += static.samples[-1].waiting + static.samples[-1].running
    assert abs(came - expected) < 5 * math.sqrt(expected)  # Poisson
    assert static.replica_s == 3 * traffic.duration_s
    assert all(wait_s >= 0 for wait_s in static.answers.wait_s)


def test_fleet_grows_until_no_request_waits() -> None:
    """At six times the capacity of one replica, one replica refuses most requests, and a scaled fleet few."""
    traffic = _steady(6 * CURVE.highest_per_s, 0.5)
    alone, scaled = _run(traffic, None, 1), _run(traffic, (Trigger(metric="waiting", target=5),), 1)
    assert len(alone.answers.refused_s) > 0.7 * len(alone.answers.latency_s)
    assert scaled.samples[-1].replicas > 6
    # A quarter, because Kubernetes' default behaviour shrinks it to one whenever no request has waited for 300 s.
    assert len(scaled.answers.refused_s) < 0.25 * len(alone.answers.refused_s)


def test_new_replicas_serve_only_after_their_start() -> None:
    """The fleet is sampled once in each period, so times are known to one period."""
    scaled = ScaledObject(
        scaling=Scaling(min_replicas=1, max_replicas=20), triggers=(Trigger(metric="waiting", target=5),)
    )
    slow = Environment(start_s=120.0, discovery_s=0.0, cache_of_full_rows=1.0)
    outcome = Fleet(CURVE, LIMITS, slow, scaled).run(_steady(6 * CURVE.highest_per_s, 0.2), 1, seed=1)
    first = next(sample for sample in outcome.samples if sample.replicas > 1)
    ready = next(sample for sample in outcome.samples if sample.ready > 1)
    assert abs(ready.time_s - first.time_s - slow.start_s) <= SYNC_PERIOD_S


def test_more_requests_are_refused_when_clients_discover_replicas_slowly() -> None:
    """With 300 s of discovery the old replicas still get most of the load, and more requests are refused."""
    traffic, triggers = _steady(4 * CURVE.highest_per_s, 0.3), (Trigger(metric="waiting", target=5),)
    scaled = ScaledObject(scaling=Scaling(min_replicas=1, max_replicas=20), triggers=triggers)
    slow = Environment(start_s=20.0, discovery_s=300.0, cache_of_full_rows=1.0)
    late = Fleet(CURVE, LIMITS, slow, scaled).run(traffic, 1, seed=1)
    soon = Fleet(CURVE, LIMITS, AT_ONCE, scaled).run(traffic, 1, seed=1)
    assert len(late.answers.refused_s) > 1.2 * len(soon.answers.refused_s)


def test_cpu_metric_scales_out_although_no_request_waits() -> None:
    """A replica with one request uses as much CPU as a full one, so CPU scales out at an eighth of the load."""
    traffic = _steady(2 * 0.25 * CURVE.at(16), 1.0)
    by_cpu = _run(traffic, (Trigger(metric="cpu", target=0.5),), 2)
    by_waiting = _run(traffic, (Trigger(metric="waiting", target=5),), 2)
    assert by_cpu.samples[-1].replicas > 2 * by_waiting.samples[-1].replicas
    assert max(sample.waiting for sample in by_waiting.samples) == 0


def test_day_depends_on_the_seed_and_has_bursts_at_the_given_times() -> None:
    burst = Burst(start_s=54_000, length_s=600, factor=3.0)
    quiet, loud = (day(100.0, noise=0.1, burst=one, seed=3) for one in (None, burst))
    assert quiet.duration_s == 86_400
    ratio = loud.rates / quiet.rates
    assert set(np.flatnonzero(ratio > 1.5) * 60) == set(range(54_000, 54_600, 60))
    smooth = day(100.0, noise=0.0, burst=None, seed=3)
    assert smooth.peak_per_s == pytest.approx(100.0)
    assert smooth.rates.argmax() // 60 in range(10, 13)


def test_traffic_of_a_file_is_replayed_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv"
    path.write_text("time_s,requests_per_s\n0,1\n300,5\n600,0\n", encoding="utf-8")
    traffic = read_traffic(path)
    assert [traffic.at(time_s) for time_s in (0, 299, 300, 899)] == [1, 1, 5, 0]
    path.write_text("time_s,requests_per_s\n0,1\n300,5\n500,0\n", encoding="utf-8")
    with pytest.raises(CapacityError, match="line 4: time_s must rise by 300"):
        read_traffic(path)


def test_curve_is_interpolated_between_its_points(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({"rows": [2, 4], "answers_per_s": [6, 10], "work": [1, 3]}), encoding="utf-8")
    curve = read_curve(path)
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 64)] == [3, 6, 8, 10, 10]
    assert curve.work == (0.5, 1.5)


def test_scaled_object_that_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    found = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    path = tmp_path / "scaledobject.yaml"
    found["spec"]["triggers"][0]["metadata"]["query"] = "sum(up)"
    path.write_text(yaml.safe_dump(found), encoding="utf-8")
    with pytest.raises(CapacityError, match="it must be about one of antiphon_num_requests_waiting"):
        read_scaled_object(path)
    found["spec"]["minReplicaCount"] = 0
    path.write_text(yaml.safe_dump(found), encoding="utf-8")
    with pytest.raises(CapacityError, match="minReplicaCount is 0"):
        read_scaled_object(path)


def test_command_writes_figures_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve, figures, picture = tmp_path / "curve.json", tmp_path / "day.json", tmp_path / "day.png"
    curve.write_text(json.dumps({"rows": [1, 8], "answers_per_s": [2, 5], "work": [1]}), encoding="utf-8")
    files = ["--curve", str(curve), "--scaled-object", str(SHIPPED), "--json", str(figures), "--plot", str(picture)]
    assert main(["simulate", *files, "--compare", "--hours", "1", "--burst-at-h", "0.2"]) == 0
    cases = json.loads(figures.read_text(encoding="utf-8"))["cases"]
    assert cases[0]["name"] == "as shipped"
    printed = capsys.readouterr().out
    assert all(one["name"] in printed for one in cases)
    assert picture.read_bytes().startswith(b"\x89PNG")


CURVE_FILE = '{"rows": [1], "answers_per_s": [1], "work": [1]}'


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        ("[]", [], "is not an object"),
        ('{"rows": [1, 1], "answers_per_s": [1, 2], "work": [1]}', [], "rows must rise"),
        ('{"rows": [1, 2], "answers_per_s": [1], "work": [1]}', [], "answers_per_s has 1 entries; rows has 2"),
        ('{"rows": [1], "answers_per_s": [-1], "work": [1]}', [], "answers_per_s must be a list of numbers above 0"),
        ('{"rows": [1], "answers_per_s": [1]}', [], "work must be"),
        (CURVE_FILE, ["--peak", "0"], "--peak: '0'; it must be a number above 0"),
        (CURVE_FILE, ["--compare"], "--compare needs --scaled-object"),
        (CURVE_FILE, ["--seed", "-1"], "--seed: '-1'; it must be a whole number from 0 to 4,294,967,295"),
    ],
)
def test_wrong_curves_and_flags_exit_with_2_and_are_named(
    content: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = tmp_path / "curve.json"
    curve.write_text(content, encoding="utf-8")
    try:
        code: object = main(["simulate", "--curve", str(curve), *flags])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert said in capsys.readouterr().err


# "Algorithm details": 200m against 100m doubles, 50m against 100m halves; nothing happens within a tenth of 1.0.
RATIOS = [(4, 200, 100, 8), (4, 50, 100, 2), (4, 109, 100, 4), (4, 91, 100, 4), (4, 112, 100, 5), (3, 88, 100, 3)]
ANY = Rules(window_s=0, select="Max", policies=(Policy(kind="Percent", value=10_000, period_s=15),))


@pytest.mark.parametrize(("current", "value", "target", "expected"), RATIOS)
def test_desired_replicas_follow_the_formula(current: int, value: float, target: float, expected: int) -> None:
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
