"""Mixed traffic to a real server for a given time, with a check for leaks.

    python -m tests.reliability.endurance --minutes 60

Calls arrive at random times at a moderate rate, and every answer is compared with its reference. The server's memory,
threads and descriptors are sampled every few seconds. After a warm-up, the median of the first part is compared with
that of the last. Figures are written to build/reliability/endurance.json during the run. The exit code is 1 if a
promise did not hold.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.client import AsyncClient
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.asking import references
from tests.reliability.footprint import Footprint, footprint, settled, steady
from tests.reliability.sizes import report
from tests.reliability.traffic import Tally, Traffic, warm_up

MAX_GROWTH = 0.02
# More calls in flight than this are an error: the server hangs or is too slow.
MAX_UNDER_WAY = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Durations of the run and its warm-up, calls per second, and interval of the samples."""

    duration_s: float
    warm_up_s: float
    rate_per_s: float
    sample_s: float = 2.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of the server at a time in seconds after the start."""

    time_s: float
    held: Footprint


async def endure(server: ServerProcess, plan: Plan) -> dict[str, Any]:
    """Run the plan against an idle server, and return the figures."""
    rng, tally, samples = random.Random(plan.seed), Tally(), list[Sample]()
    async with AsyncClient(server.target) as client:
        expected = await references(client)
        await warm_up(Traffic(target=server.target, client=client, expected=expected, tally=Tally(), rng=rng))
    calm = await asyncio.to_thread(settled, server.process.pid, steady())
    async with AsyncClient(server.target) as client:
        traffic = Traffic(target=server.target, client=client, expected=expected, tally=tally, rng=rng)
        sampling = asyncio.ensure_future(_sample(server.process.pid, plan, tally, samples))
        await _send(traffic, plan)
        sampling.cancel()
        await asyncio.wait({sampling})
    # In another thread, because the event loop must close connections of this side.
    await asyncio.to_thread(server.wait_for_metrics, is_idle)
    at_rest = await asyncio.to_thread(settled, server.process.pid, lambda held: _is_no_larger(held, calm))
    return _figures(plan, tally, samples) | {
        "at_rest": {"threads": at_rest.threads, "descriptors": at_rest.descriptors},
        "at_start": {"threads": calm.threads, "descriptors": calm.descriptors},
    }


async def _send(traffic: Traffic, plan: Plan) -> None:
    """Start calls at the times of a Poisson process, independent of the earlier calls."""
    begin_s = due_s = time.monotonic()
    under_way: set[asyncio.Task[None]] = set()
    while (due_s := due_s + traffic.rng.expovariate(plan.rate_per_s)) < begin_s + plan.duration_s:
        await asyncio.sleep(due_s - time.monotonic())
        if len(under_way) >= MAX_UNDER_WAY:
            raise AssertionError(f"{MAX_UNDER_WAY} calls are under way and none ends")
        task = asyncio.ensure_future(traffic.one())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)


async def _sample(pid: int, plan: Plan, tally: Tally, samples: list[Sample]) -> None:
    begin_s = time.monotonic()
    while True:
        samples.append(Sample(time.monotonic() - begin_s, footprint(pid)))
        if len(samples) % 10 == 0:
            report("endurance", _figures(plan, tally, samples), is_quiet=True)
        await asyncio.sleep(plan.sample_s)


def _figures(plan: Plan, tally: Tally, samples: Sequence[Sample]) -> dict[str, Any]:
    warm = [sample for sample in samples if sample.time_s >= plan.warm_up_s] or samples[-1:]
    part_len = max(1, len(warm) // 10)
    first, last = ([sample.held for sample in part] for part in (warm[:part_len], warm[-part_len:]))
    growth = _median(last, "resident_bytes") / _median(first, "resident_bytes") - 1
    return {
        "minutes": round(samples[-1].time_s / 60, 2),
        "rate_per_s": plan.rate_per_s,
        "warm_up_s": plan.warm_up_s,
        "calls": tally.outcomes.total(),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "wrong": tally.wrong,
        "resident_first_mb": round(_median(first, "resident_bytes") / 1e6, 2),
        "resident_last_mb": round(_median(last, "resident_bytes") / 1e6, 2),
        "growth_percent": round(100 * growth, 3),
        "threads": [_median(first, "threads"), _median(last, "threads")],
        "descriptors": [_median(first, "descriptors"), _median(last, "descriptors")],
        "resident_mb_each_minute": [
            round(sample.held.resident_bytes / 1e6, 2) for sample in samples[:: max(1, round(60 / plan.sample_s))]
        ],
    }


def _median(held: Sequence[Footprint], name: str) -> float:
    found: list[int] = [getattr(one, name) for one in held]
    return statistics.median(found)


def _is_no_larger(held: Footprint, than: Footprint) -> bool:
    return held.threads <= than.threads and held.descriptors <= than.descriptors


def complaints(figures: dict[str, Any]) -> list[str]:
    """Return the broken promises in words. Memory counts only in runs that are long enough."""
    start, rest = figures["at_start"], figures["at_rest"]
    grown = [f"{name} grew from {start[name]} to {rest[name]}" for name in start if rest[name] > start[name]]
    return [*figures["wrong"], *grown]


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic against a real server, its memory watched.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=12, help="calls a second")
    parser.add_argument("--warm-up-minutes", type=float, default=None, help="default: a tenth of the time, 10 at most")
    parser.add_argument("--serve", action="append", default=[], help="a flag of the server, --serve=--fronts=2")
    flags = parser.parse_args()
    warm_up_minutes = min(10.0, flags.minutes / 10) if flags.warm_up_minutes is None else flags.warm_up_minutes
    plan = Plan(duration_s=60 * flags.minutes, warm_up_s=60 * warm_up_minutes, rate_per_s=flags.rate)
    with ServerProcess(SHIPPED_BUNDLE, flags.serve) as server:
        figures = asyncio.run(endure(server, plan))
    found = complaints(figures)
    if figures["growth_percent"] >= 100 * MAX_GROWTH:
        found.append(f"resident memory grew by {figures['growth_percent']} %")
    path = report("endurance", figures | {"complaints": found})
    print(f"figures: {path}", *found, sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
