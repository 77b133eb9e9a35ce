"""`antiphon simulate`: the shipped autoscaler under the traffic of a day, with the resulting latencies and costs.

Every request is simulated individually, on replicas with the measured speed. docs/MEMORY.md describes the model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from antiphon.cli.common import report_error, write_problem
from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.autoscaler import ScaledObject, Trigger, read_scaled_object
from antiphon.tools.capacity.flags import CapacityError, add_limit_flag, number, whole
from antiphon.tools.capacity.fleet import Environment, Fleet, Outcome
from antiphon.tools.capacity.simulated_replica import ServiceCurve, read_curve
from antiphon.tools.capacity.traffic import Burst, Floats, Traffic, day, read_traffic, steady

HOUR_S = 3600.0
_HEAD = ("", "refused", "wait p50", "p99", "answer p50", "p99", "too slow", "replica-hours", "mean", "most", "changes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of one day. Times are of answered requests, in seconds. Shares are of all requests."""

    name: str
    requests: int
    refused_share: float
    wait_p50_s: float
    wait_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    slow_share: float
    """Requests that were refused or took longer than the objective."""
    replica_hours: float
    replicas_mean: float
    replicas_max: int
    changes: int


def figures_of(name: str, outcome: Outcome, objective_s: float) -> Figures:
    """Compute the figures of a day. objective_s: maximum latency of a good answer."""
    answers = outcome.answers
    wait_s, latency_s = np.array(answers.wait_s), np.array(answers.latency_s)
    counts = np.array([sample.replicas for sample in outcome.samples])
    requests = len(wait_s) + len(answers.refused_s)
    num_slow = int((latency_s > objective_s).sum()) + len(answers.refused_s)
    return Figures(
        name=name,
        requests=requests,
        refused_share=len(answers.refused_s) / max(1, requests),
        wait_p50_s=_percentile(wait_s, 50),
        wait_p99_s=_percentile(wait_s, 99),
        latency_p50_s=_percentile(latency_s, 50),
        latency_p99_s=_percentile(latency_s, 99),
        slow_share=num_slow / max(1, requests),
        replica_hours=outcome.replica_s / HOUR_S,
        replicas_mean=float(counts.mean()),
        replicas_max=int(counts.max()),
        changes=int((np.diff(counts) != 0).sum()),
    )


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else 0.0


def as_text(figures: Sequence[Figures], traffic: Traffic, curve: ServiceCurve) -> str:
    """Return a table with a line for each day of the same traffic."""
    came = f"{figures[0].requests:,} requests in {traffic.duration_s / HOUR_S:g} h, {traffic.peak_per_s:,.1f}/s at most"
    can = f"a replica answers {curve.highest_per_s:,.1f}/s at most ({curve.origin})"
    rows = [_HEAD, *map(_row, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for name, *cells in rows:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{name:<{widths[0]}}", *padded]))
    return "\n".join([f"{came}; {can}", "", *lines])


def _row(figures: Figures) -> tuple[str, ...]:
    times = (figures.wait_p50_s, figures.wait_p99_s, figures.latency_p50_s, figures.latency_p99_s)
    return (
        figures.name,
        f"{figures.refused_share:.2%}",
        *(f"{time_s:.2f} s" for time_s in times),
        f"{figures.slow_share:.2%}",
        f"{figures.replica_hours:,.1f}",
        f"{figures.replicas_mean:.1f}",
        f"{figures.replicas_max}",
        f"{figures.changes}",
    )


# Other thresholds, for comparison.
_WAITING_TARGETS = (2, 5, 10)
_CPU_TARGET = 0.8
SIMULATED_LIMITS = ("max_num_seqs", "max_queued_requests", "max_queue_time_s")
"""Limits on which a simulated replica depends; each is a flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon simulate`."""
    parser.add_argument(
        "--curve", type=Path, required=True, metavar="FILE", help="speed of one replica, as measure_curve writes it"
    )
    parser.add_argument(
        "--scaled-object",
        type=Path,
        metavar="FILE",
        help="KEDA's ScaledObject; without it the number of replicas is constant",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also simulate other thresholds, CPU, and a static fleet"
    )
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_environment_flags(parser.add_argument_group("environment of the replicas"))
    group = parser.add_argument_group("output")
    group.add_argument("--objective-s", type=number(0, 3600), default=1.0, metavar="S", help="(default: %(default)s)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    group.add_argument("--plot", type=Path, metavar="FILE", help="plot the day, as PNG; needs matplotlib")


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    what = group.add_mutually_exclusive_group()
    what.add_argument("--steady", type=number(0, 1e5), metavar="R", help="requests per second, constant")
    what.add_argument("--traffic", type=Path, metavar="FILE", help="CSV of time_s, requests_per_s, at even intervals")
    what.add_argument(
        "--peak",
        type=number(0, 1e5),
        metavar="R",
        help="requests per second at the peak of a day (default: the maximum of 4 replicas)",
    )
    group.add_argument(
        "--noise",
        type=number(-1e-9, 2),
        default=0.1,
        metavar="D",
        help="standard deviation of the rate's logarithm (default: %(default)s)",
    )
    group.add_argument("--burst-at-h", type=number(-1e-9, 24), default=15.0, metavar="H", help="(default: %(default)s)")
    group.add_argument(
        "--burst-min", type=number(-1e-9, 1440), default=10.0, metavar="M", help="(default: %(default)s)"
    )
    group.add_argument(
        "--burst-factor",
        type=number(0, 100),
        default=2.0,
        metavar="X",
        help="factor on the rate (default: %(default)s)",
    )
    group.add_argument("--hours", type=number(0, 24), default=24.0, metavar="H", help="simulated hours (default: all)")
    group.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="(default: %(default)s)")


def _add_environment_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--replicas",
        type=whole(1, 10_000),
        metavar="N",
        help="initial number of replicas (default: minReplicaCount, or 1)",
    )
    group.add_argument(
        "--start-s",
        type=number(-1e-9, 3600),
        default=20.0,
        metavar="S",
        help="time until a new pod is ready (default: 20)",
    )
    group.add_argument(
        "--discovery-s",
        type=number(-1e-9, 86_400),
        default=300.0,
        metavar="S",
        help="time until all clients know a new pod, ANTIPHON_MAX_CONNECTION_AGE_S; 0 behind a proxy "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--cache-of-full-rows",
        type=number(0, 1),
        default=1.0,
        metavar="U",
        help="share of the cache blocks that max_num_seqs typical requests use (default: all)",
    )
    for name in SIMULATED_LIMITS:
        add_limit_flag(group, name, help_text="as in the server (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print the table and return the exit code."""
    try:
        curve = read_curve(arguments.curve)
        scaled = None if arguments.scaled_object is None else read_scaled_object(arguments.scaled_object)
        _check(arguments, scaled)
        traffic = _traffic(arguments, curve)
        outcomes = list(_simulated(arguments, curve, scaled, traffic))
        figures = [figures_of(name, outcome, arguments.objective_s) for name, outcome in outcomes]
        print(as_text(figures, traffic, curve))
        _write(arguments, figures, outcomes, curve)
    except CapacityError as error:
        return report_error("simulate", error)
    return 0


def _check(arguments: argparse.Namespace, scaled: ScaledObject | None) -> None:
    if arguments.compare and scaled is None:
        raise CapacityError("--compare needs --scaled-object, with which the others are compared")
    for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise CapacityError(f"{flag} {path} cannot be written: it must name a file in a directory that exists")
    if arguments.plot is not None:
        import matplotlib  # noqa: F401 - the command line says what to install


def _traffic(arguments: argparse.Namespace, curve: ServiceCurve) -> Traffic:
    if arguments.traffic is not None:
        whole_day = read_traffic(arguments.traffic)
    elif arguments.steady is not None:
        whole_day = steady(arguments.steady)
    else:
        burst = Burst(
            start_s=HOUR_S * arguments.burst_at_h, length_s=60 * arguments.burst_min, factor=arguments.burst_factor
        )
        peak = arguments.peak or 4 * curve.highest_per_s
        whole_day = day(peak, noise=max(0.0, arguments.noise), burst=burst, seed=arguments.seed)
    count = max(1, math.ceil(HOUR_S * arguments.hours / whole_day.interval_s))
    return Traffic(rates=whole_day.rates[:count], interval_s=whole_day.interval_s)


def _simulated(
    arguments: argparse.Namespace, curve: ServiceCurve, scaled: ScaledObject | None, traffic: Traffic
) -> Iterator[tuple[str, Outcome]]:
    """Simulate the ScaledObject first, then the cases to compare with it."""
    limits = EngineLimits(**{name: getattr(arguments, name) for name in SIMULATED_LIMITS})
    environment = Environment(
        start_s=arguments.start_s,
        discovery_s=arguments.discovery_s,
        cache_of_full_rows=arguments.cache_of_full_rows,
    )
    first = arguments.replicas or (1 if scaled is None else scaled.scaling.min_replicas)
    for name, scaled_object, count in _cases(arguments, curve, scaled, traffic, first):
        print(f"antiphon simulate: {name}", file=sys.stderr)
        yield name, Fleet(curve, limits, environment, scaled_object).run(traffic, count, arguments.seed)


def _cases(
    arguments: argparse.Namespace, curve: ServiceCurve, scaled: ScaledObject | None, traffic: Traffic, first: int
) -> Iterator[tuple[str, ScaledObject | None, int]]:
    """Yield each case: its name, its ScaledObject (None if static) and its initial number of replicas."""
    if scaled is None:
        yield f"static, {first}", None, first
        return
    yield "as shipped", scaled, first
    if not arguments.compare:
        return
    for target in _WAITING_TARGETS:
        yield f"waiting {target}", scaled.with_triggers(Trigger(metric="waiting", target=target)), first
    yield "cache 0.8", scaled.with_triggers(Trigger(metric="cache", target=0.8)), first
    half = Trigger(metric="running", target=arguments.max_num_seqs / 2)
    yield f"running {half.target:g}", scaled.with_triggers(half), first
    yield f"{half.target:g}, waiting 5", scaled.with_triggers(half, Trigger(metric="waiting", target=5)), first
    yield f"cpu {_CPU_TARGET:g}", scaled.with_triggers(Trigger(metric="cpu", target=_CPU_TARGET)), first
    enough = math.ceil(traffic.peak_per_s / curve.highest_per_s)
    yield f"static, {enough}", None, enough


def _write(
    arguments: argparse.Namespace, figures: list[Figures], outcomes: list[tuple[str, Outcome]], curve: ServiceCurve
) -> None:
    if arguments.json is not None:
        text = json.dumps({"curve": curve.origin, "cases": [asdict(case) for case in figures]}, indent=2)
        _write_bytes("--json", arguments.json, f"{text}\n".encode())
    if arguments.plot is not None:
        from antiphon.tools.capacity.day_plot import draw_day

        _write_bytes("--plot", arguments.plot, draw_day(outcomes, curve))


def _write_bytes(flag: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CapacityError(write_problem(flag, path, error)) from None
