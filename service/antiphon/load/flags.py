"""Flags of `antiphon load`, and the plan that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.cli.common import positive
from antiphon.cli.connection_flags import add_connection_flags, read_connection
from antiphon.client import DEFAULT_TARGET
from antiphon.client.options import PRIORITIES
from antiphon.load.plan import Ask, Objective, Plan, PlanError
from antiphon.load.workload import Entry, read_texts, read_trace

DEFAULT_RATE = 10.0
DEFAULT_DURATION_S = 10.0


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `antiphon load`."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_arrival_flags(parser.add_argument_group("requests and arrivals"))
    _add_client_flags(parser.add_argument_group("client"))
    _add_output_flags(parser.add_argument_group("objective and output"))
    add_connection_flags(parser)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    group.add_argument("--model", default="", metavar="NAME", help="model that answers (default: the server's first)")


def _add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate", type=float, metavar="R", help=f"mean requests per second, Poisson (default: {DEFAULT_RATE:g})"
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help=f"seconds of load (default: {DEFAULT_DURATION_S:g}, or as long as the trace)",
    )
    group.add_argument("--warmup", type=float, default=0.0, metavar="S", help="seconds of load before the counted ones")
    group.add_argument(
        "--input", metavar="FILE", help="texts, one per line; '-' is standard input (default: everyday sentences)"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines or CSV of time_s, text or source_tokens, max_new_tokens"
    )
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help="maximum tokens of an answer")
    group.add_argument("--ignore-eos", action="store_true", help="every answer is as long as its max_new_tokens")
    group.add_argument(
        "--priority",
        choices=tuple(PRIORITIES),
        help="batch gives interactive requests precedence (default: server's)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the arrivals (default: %(default)s)")


def _add_client_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--unary", action="store_true", help="request complete answers instead of streams")
    group.add_argument("--multiplexed", action="store_true", help="send all requests of a connection over one call")
    group.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="S", help="deadline of every call (default: %(default)g)"
    )
    group.add_argument(
        "--processes", type=int, default=1, metavar="N", help="client processes that share the load (default: 1)"
    )
    group.add_argument(
        "--connections", type=int, default=1, metavar="N", help="connections of each process (default: 1)"
    )
    group.add_argument(
        "--max-outstanding",
        type=int,
        default=10_000,
        metavar="N",
        help="maximum concurrent calls; further arrivals are dropped and counted (default: %(default)s)",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--objective-ttft-ms", type=float, metavar="MS", help="limit of p99 of the time to first token")
    group.add_argument(
        "--objective-p99-ms", type=float, metavar="MS", help="limit of p99 of the time to the whole answer"
    )
    group.add_argument("--fail", action="store_true", help="exit 1 if the objective is missed or 1 %% failed")
    group.add_argument("--check", action="store_true", help="compare the answers to equal texts; exit 1 if any differ")
    several = group.add_mutually_exclusive_group()
    several.add_argument("--search", action="store_true", help="find the highest rate that meets the objective")
    several.add_argument("--rates", type=_rates, metavar="R,...", help="one run at each rate")
    several.add_argument(
        "--mlperf", type=Path, metavar="DIR", help="use LoadGen (MLPerf, Server scenario); its logs go to DIR"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="plot latency and goodput by rate, as PNG")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def read_plan(arguments: argparse.Namespace) -> tuple[Plan, list[Entry]]:
    """Return the plan of the first run, and the entries of its trace if there is one.

    Raises PlanError, and ValueError for a connection that cannot be used.
    """
    if arguments.search and arguments.objective_ttft_ms is None and arguments.objective_p99_ms is None:
        raise PlanError("--search needs --objective-ttft-ms or --objective-p99-ms, which a rate must meet")
    if arguments.rate is not None and arguments.rates is not None:
        raise PlanError("--rate and --rates exclude each other")
    if arguments.mlperf is not None and (arguments.plot is not None or arguments.check):
        raise PlanError("--mlperf excludes --plot and --check: LoadGen keeps no answers, and runs at one rate")
    if arguments.trace is None:
        return _poisson_plan(arguments), []
    for flag, value in (
        ("--rate", arguments.rate), ("--rates", arguments.rates), ("--search", arguments.search or None),
        ("--input", arguments.input),
    ):  # fmt: skip
        if value is not None:
            raise PlanError(f"{flag} and --trace exclude each other: the trace defines requests and times")
    entries = read_trace(arguments.trace)
    return _trace_plan(arguments, entries), entries


def _poisson_plan(arguments: argparse.Namespace) -> Plan:
    return Plan(
        asks=tuple(Ask(source=text, max_new_tokens=arguments.max_new_tokens) for text in read_texts(arguments.input)),
        rate=DEFAULT_RATE if arguments.rate is None else arguments.rate,
        duration_s=DEFAULT_DURATION_S if arguments.duration is None else arguments.duration,
        **_common(arguments),
    )


def _trace_plan(arguments: argparse.Namespace, entries: Sequence[Entry]) -> Plan:
    last_s = entries[-1].time_s
    # The window ends one mean interval after the last arrival, so that arrivals / window is their rate.
    whole_s = last_s + last_s / (len(entries) - 1) if last_s else 1.0
    if arguments.warmup >= whole_s:
        raise PlanError(f"--warmup is {arguments.warmup:g}; the trace ends after {last_s:g} s")
    return Plan(
        asks=tuple(
            Ask(source=entry.text or "", max_new_tokens=entry.max_new_tokens or arguments.max_new_tokens)
            for entry in entries
        ),
        times_s=tuple(entry.time_s for entry in entries),
        duration_s=whole_s - arguments.warmup if arguments.duration is None else arguments.duration,
        **_common(arguments),
    )


def _common(arguments: argparse.Namespace) -> dict[str, Any]:
    return dict(
        target=arguments.target,
        model=arguments.model,
        warmup_s=arguments.warmup,
        seed=arguments.seed,
        processes=arguments.processes,
        connections=arguments.connections,
        max_outstanding=arguments.max_outstanding,
        timeout_s=arguments.timeout_s,
        priority=arguments.priority,
        connection=read_connection(arguments),
        is_streaming=not arguments.unary,
        is_multiplexed=arguments.multiplexed,
        ignore_eos=arguments.ignore_eos,
        check=arguments.check,
        objective=Objective(ttft_s=_seconds(arguments.objective_ttft_ms), e2e_s=_seconds(arguments.objective_p99_ms)),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates, as in 50,100,200") from None
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: rates must be above 0")
    return sorted(set(rates))
