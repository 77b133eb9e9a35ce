"""Section `host`: CPU time that the engine itself takes, for each request and for each step.

The runner computes nothing. Runs with short and with long targets, and the same number of requests, differ in the
number of steps only: two equations give the time of a request and the time of a step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from antiphon.tools.bench.drivers.null_runner import NullRunner
from antiphon.tools.bench.report import Finding
from antiphon.tools.bench.setup import Setup
from antiphon.tools.offline import Offline

ROWS = 64
BEAM_WIDTH = 4
_SOURCE = [*range(4, 13), 2]
_TARGET_LENS = (8, 40)
_REQUESTS_PER_ROW = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTime:
    """CPU seconds of the engine's thread, and of the event loop, in one run over `num_requests` requests."""

    num_requests: int
    num_steps: int
    engine_s: float
    loop_s: float


def host(setup: Setup) -> list[Finding]:
    """Measure greedy requests and beam searches, independent of any model."""
    findings = []
    for rows in setup.rows or (ROWS,):
        for width in (1, BEAM_WIDTH):
            if width <= rows:
                findings += _of(rows, width, setup.repeat)
    return findings


def _of(rows: int, beam_width: int, num_runs: int) -> list[Finding]:
    kind = "greedy" if beam_width == 1 else f"beams of {beam_width}"
    measure(rows, beam_width, _TARGET_LENS[0])  # not measured: the first run imports and allocates
    short_runs, long_runs = (
        [measure(rows, beam_width, target_len) for _ in range(num_runs)] for target_len in _TARGET_LENS
    )
    costs = [split(*pair) for pair in zip(short_runs, long_runs, strict=True)]
    loops = [1e6 * one.loop_s / one.num_requests for one in short_runs]
    figures = {
        "engine's thread, a request": [request for request, _ in costs],
        "engine's thread, a step": [step for _, step in costs],
        "event loop, a request": loops,
    }
    return [
        Finding(
            name="host",
            case=f"{kind}, {what}",
            rows=rows,
            antiphon=round(statistics.median(values), 1),
            unit="us of CPU",
        )
        for what, values in figures.items()
    ]


def split(short: HostTime, long: HostTime) -> tuple[float, float]:
    """Return microseconds of the engine's thread for each request, and for each step, from two runs.

    The runs have equally many requests and different numbers of steps.
    """
    step_s = (long.engine_s - short.engine_s) / (long.num_steps - short.num_steps)
    request_s = (short.engine_s - short.num_steps * step_s) / short.num_requests
    return 1e6 * request_s, 1e6 * step_s


def measure(rows: int, beam_width: int, target_len: int) -> HostTime:
    """Run requests of one kind through an engine whose runner computes nothing."""
    runner = NullRunner(rows, target_len)
    sources = [_SOURCE] * (_REQUESTS_PER_ROW * rows // beam_width)
    with Offline(runner, rows=rows) as offline:
        started_s = time.thread_time()
        offline.translate(sources, concurrency=2 * rows, max_new_tokens=target_len + 1, beam_width=beam_width)
        loop_s = time.thread_time() - started_s
    return HostTime(num_requests=len(sources), num_steps=runner.num_steps, engine_s=runner.thread_s, loop_s=loop_s)
