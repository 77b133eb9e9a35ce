"""Load above the sustainable rate for minutes: the server must keep its goodput and refuse the rest with a status.

    python -m tests.reliability.overload --minutes 10 --factors 1.5 2 4 8 --pinned

A search finds the highest rate at which 99 % of the answers are within the objective and fewer than 1 % are refused;
its goodput is the best. Then each factor of that rate is offered. Figures are written to
build/reliability/overload.json. The exit code is 1 if a promise did not hold. Client and server share this machine, so
the rates are those of both; with --pinned, each has half of the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from antiphon.load.drive import bracketed_rate, run
from antiphon.load.plan import Ask, Objective, Plan
from antiphon.load.results import Result
from antiphon.load.workload import EVERYDAY
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.footprint import footprint
from tests.reliability.sizes import report

REFUSED = "RESOURCE_EXHAUSTED"
# Share of the best goodput, under every factor.
LEAST_GOODPUT = 0.9
MAX_GROWTH = 0.02
PRECISION = 0.05
# Answers are long and of one length, so that the server and not the client limits the rate.
NEW_TOKENS = 64
START_RATE = 50.0
SAMPLE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Durations of the overload and of each probe, the objective, and the longest time in the queue."""

    overload_s: float
    probe_s: float
    objective_s: float
    queue_time_s: float


def overload(server: ServerProcess, sizes: Sizes, factors: Sequence[float]) -> dict[str, Any]:
    """Search the rate, then overload by each factor. Return the figures of both, those of a factor under its name."""
    plan = Plan(
        asks=tuple(Ask(source=text, max_new_tokens=NEW_TOKENS) for text in EVERYDAY),
        rate=START_RATE,
        duration_s=sizes.probe_s,
        warmup_s=2.0,
        target=server.target,
        ignore_eos=True,
        objective=Objective(e2e_s=sizes.objective_s),
    )
    probes: list[Result] = []

    def holds(rate: float) -> bool:
        probes.append(run(replace(plan, rate=rate)))
        return probes[-1].has_met_objective

    rate = bracketed_rate(holds, START_RATE, PRECISION)
    best = max(probe.goodput_per_s or 0.0 for probe in probes if probe.has_met_objective)
    figures: dict[str, Any] = {
        "objective_p99_ms": 1000 * sizes.objective_s,
        "max_queue_time_s": sizes.queue_time_s,
        "sustainable_per_s": round(rate, 1),
        "best_goodput_per_s": round(best, 1),
    }
    for factor in factors:
        with _Memory(server.process.pid) as memory:
            beyond = run(replace(plan, rate=factor * rate, duration_s=sizes.overload_s, warmup_s=5.0))
        server.wait_for_metrics(is_idle)
        figures[f"{factor:g} times"] = _figures(beyond, best) | {
            "growth_percent": round(100 * memory.growth, 3),
            "resident_mb": [round(held / 1e6, 2) for held in memory.ends],
        }
    return figures


def _figures(beyond: Result, best: float) -> dict[str, Any]:
    goodput = beyond.goodput_per_s or 0.0
    return {
        "minutes": round(beyond.window_s / 60, 2),
        "offered_per_s": round(beyond.sent_per_s, 1),
        "sent": beyond.num_sent,
        "ok": beyond.num_ok,
        "errors": beyond.errors,
        "error_reasons": beyond.error_reasons,
        "with_pushback": beyond.num_pushbacks,
        "not_sent": beyond.num_dropped,
        "goodput_per_s": round(goodput, 1),
        "goodput_of_best": round(goodput / best, 3),
        "e2e_p50_ms": None if beyond.e2e_ms is None else round(beyond.e2e_ms.p50, 1),
        "e2e_p99_ms": None if beyond.e2e_ms is None else round(beyond.e2e_ms.p99, 1),
        "client_lag_p99_ms": None if beyond.lag_ms is None else round(beyond.lag_ms.p99, 1),
    }


def complaints(figures: dict[str, Any], objective_ms: float) -> list[str]:
    """Return the promises that did not hold under one factor, in words."""
    refused = figures["errors"].get(REFUSED, 0)
    promises = {
        f"goodput is {figures['goodput_of_best']} of the best": figures["goodput_of_best"] >= LEAST_GOODPUT,
        f"errors are {figures['error_reasons']}": set(figures["errors"]) == {REFUSED},
        f"{figures['with_pushback']} of {refused} refusals say when to try again": figures["with_pushback"] == refused,
        f"p99 is {figures['e2e_p99_ms']} ms": (figures["e2e_p99_ms"] or 0) <= objective_ms,
        f"memory grew by {figures['growth_percent']} %": figures["growth_percent"] < 100 * MAX_GROWTH,
    }
    return [words for words, holds in promises.items() if not holds]


class _Memory:
    """Samples a process's resident memory on a thread; its first tenth is warm-up."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def ends(self) -> tuple[float, float]:
        """Return the median bytes of the first part after the warm-up, and of the last part."""
        warm = self._samples[len(self._samples) // 10 :]
        part_len = max(1, len(warm) // 10)
        return statistics.median(warm[:part_len]), statistics.median(warm[-part_len:])

    @property
    def growth(self) -> float:
        first, last = self.ends
        return last / first - 1

    def _sample(self) -> None:
        while True:
            self._samples.append(footprint(self._pid).resident_bytes)
            if self._stop.wait(SAMPLE_S):
                return


def main() -> int:
    parser = argparse.ArgumentParser(description="Offer a real server more than it can sustain.")
    parser.add_argument("--factors", type=float, nargs="+", default=[2.0], help="of the sustainable rate")
    parser.add_argument("--pinned", action="store_true", help="give server and client half of the cores each")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--probe-s", type=float, default=20, help="seconds of each probe of the search")
    parser.add_argument("--objective-ms", type=float, default=1500, help="99 %% of the answers within so long")
    parser.add_argument("--max-queue-time-s", type=float, default=0.4, help="of the server")
    flags = parser.parse_args()
    sizes = Sizes(
        overload_s=60 * flags.minutes,
        probe_s=flags.probe_s,
        objective_s=flags.objective_ms / 1000,
        queue_time_s=flags.max_queue_time_s,
    )
    arguments = ["--max-queue-time-s", str(sizes.queue_time_s), "--access-log", "errors"]
    cores = sorted(os.sched_getaffinity(0))
    if flags.pinned:
        os.sched_setaffinity(0, cores[len(cores) // 2 :])  # the server inherits it
    with ServerProcess(SHIPPED_BUNDLE, arguments) as server:
        if flags.pinned:
            os.sched_setaffinity(0, cores[: len(cores) // 2])
        figures = overload(server, sizes, flags.factors)
    found = [
        f"{factor:g} times: {words}"
        for factor in flags.factors
        for words in complaints(figures[f"{factor:g} times"], figures["objective_p99_ms"])
    ]
    path = report("overload", figures | {"complaints": found})
    print(f"figures: {path}", *found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
