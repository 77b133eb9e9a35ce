"""`antiphon simulate`: the shipped autoscaler under the traffic of a day, with the resulting latencies and costs.

Every request is simulated individually, on replicas with the measured speed. docs/CAPACITY.md describes the model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.autoscaler import ScaledObject, Trigger, read_scaled_object
from antiphon.tools.capacity.day_report import Figures, as_text, figures_of
from antiphon.tools.capacity.flags import CapacityError, add_limit_flag, number, whole
from antiphon.tools.capacity.fleet import Environment, Fleet, Outcome
from antiphon.tools.capacity.simulated_replica import ServiceCurve, read_curve
from antiphon.tools.capacity.traffic import Burst, Traffic, day, read_traffic, steady

EXIT_USER_ERROR = 2
# Other thresholds, for comparison.
_WAITING_TARGETS = (2, 5, 10)
_CPU_TARGET = 0.8
_HOUR_S = 3600.0
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
        print(f"antiphon simulate: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
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
            start_s=_HOUR_S * arguments.burst_at_h, length_s=60 * arguments.burst_min, factor=arguments.burst_factor
        )
        peak = arguments.peak or 4 * curve.highest_per_s
        whole_day = day(peak, noise=max(0.0, arguments.noise), burst=burst, seed=arguments.seed)
    count = max(1, math.ceil(_HOUR_S * arguments.hours / whole_day.interval_s))
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
        raise CapacityError(f"{flag} {path} cannot be written: {error.strerror}") from None
