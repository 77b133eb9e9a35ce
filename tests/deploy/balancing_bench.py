"""One, two and three replicas on the same cores, behind each balancer: latency and highest rate.

    python -m tests.deploy.balancing_bench

Prints a table for docs/BENCHMARKS.md. First every setting runs at one rate, in turns, so that a change of the machine
affects all; then follows the highest rate of each at which 99 % of the answers come within the objective. Open loop,
latency from the scheduled time. Servers, balancer and client share this machine, so the table does not show what more
replicas achieve on more machines.
"""

import argparse
import contextlib
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace

from antiphon.client import Connection
from antiphon.load.drive import highest_rate, run
from antiphon.load.plan import Ask, Objective, Plan
from antiphon.load.results import Result
from antiphon.load.workload import EVERYDAY
from tests.deploy.balancers import NAMES, Balancer, balancer
from tests.deploy.replicas import Replicas

COUNTS = (1, 2, 3)
WARM_UP_S = 1.0
# Bounds of the search for the highest rate; four halvings leave a seventh.
LEAST_RATE, MOST_RATE, STEPS = 60.0, 480.0, 4


@dataclass(kw_only=True)
class Setting:
    """Number of replicas, their threads, and the balancer in front of them."""

    name: str
    replicas: str
    plan: Plan
    runs: list[Result]
    highest: float = 0.0

    def measure(self, rate: float) -> Result:
        """Run once; report the start on standard error."""
        print(f"{self.name}, {self.replicas}: {rate:.0f}/s", file=sys.stderr)
        return run(replace(self.plan, rate=rate))

    def holds(self, rate: float) -> bool:
        result = self.measure(rate)
        return result.has_met_objective and result.has_kept_up


def measured(arguments: argparse.Namespace) -> list[Setting]:
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Replicas(max(COUNTS)))
        wide = stack.enter_context(Replicas(1, ["--threads", "2"]))
        settings = [_direct(wide, 2, arguments), _direct(servers, 1, arguments)]
        for name in NAMES:
            for count in COUNTS[name == "round_robin" :]:
                through = stack.enter_context(balancer(name, servers.ports[:count]))
                settings.append(_setting(through, count, arguments))
        for turn in range(arguments.rounds):
            for setting in settings[:: -1 if turn % 2 else 1]:
                setting.runs.append(setting.measure(arguments.rate))
        for setting in settings:
            setting.highest = highest_rate(setting.holds, LEAST_RATE, MOST_RATE, STEPS)
    return settings


def _direct(servers: Replicas, threads: int, arguments: argparse.Namespace) -> Setting:
    plan = _plan(f"127.0.0.1:{servers.ports[0]}", Connection(), arguments)
    return Setting(name="none", replicas=f"1 x {threads}", plan=plan, runs=[])


def _setting(through: Balancer, count: int, arguments: argparse.Namespace) -> Setting:
    is_client = through.name == "round_robin"
    connection = Connection(load_balancing="round_robin") if is_client else Connection()
    plan = _plan(through.target, connection, arguments)
    return Setting(name=through.name, replicas=f"{count} x 1", plan=plan, runs=[])


def _plan(target: str, connection: Connection, arguments: argparse.Namespace) -> Plan:
    return Plan(
        asks=tuple(Ask(source=text) for text in EVERYDAY),
        rate=arguments.rate,
        duration_s=arguments.seconds,
        warmup_s=WARM_UP_S,
        target=target,
        connection=connection,
        objective=Objective(e2e_s=arguments.objective_p99_ms / 1000),
    )


def table(settings: list[Setting], arguments: argparse.Namespace) -> str:
    """Return Markdown: medians at one rate, their ratio to one replica of two threads, and the highest rate."""
    first = settings[0]
    highest = f"highest rate/s, p99 <= {arguments.objective_p99_ms:g} ms"
    lines = [
        f"| balancer | replicas x threads | p50, ms | p99, ms | p99, ratio | lost | {highest} | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in settings:
        p50, p99 = _median(one, "p50"), _median(one, "p99")
        ratios = p99 / _median(first, "p99"), one.highest / first.highest if first.highest else math.nan
        lost = sum(sum(result.errors.values()) for result in one.runs)
        lines.append(
            f"| {one.name} | {one.replicas} | {p50:.1f} | {p99:.1f} | {ratios[0]:.2f} "
            f"| {lost} | {one.highest:.0f} | {ratios[1]:.2f} |"
        )
    return "\n".join(lines)


def _median(setting: Setting, percentile: str) -> float:
    """Return a percentile of the runs, in ms; not a number if a run has no answer."""
    spreads = [result.e2e_ms for result in setting.runs]
    values = [math.nan if spread is None else float(getattr(spread, percentile)) for spread in spreads]
    return statistics.median(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=80, help="requests a second of the comparison (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each setting at that rate (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of each run, after a second of warm-up (%(default)s)")
    parser.add_argument("--objective-p99-ms", type=float, default=250, help="what a rate must hold (%(default)s)")
    arguments = parser.parse_args()
    settings = measured(arguments)
    print(
        f"{arguments.rate:g} requests/s, {arguments.rounds} runs of {arguments.seconds:g} s; {os.cpu_count()} cores\n"
    )
    print(table(settings, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
