"""Section `growth`: target tokens per second of the engine by rows, for every division of the threads into lanes.

All requests are queued at the start. Divisions that use fewer threads show what another thread adds.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from antiphon.tools.bench.report import Finding
from antiphon.tools.bench.sections.decode import ROWS, num_requests
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.timing import timed
from antiphon.tools.offline import Offline


def growth(setup: Setup) -> list[Finding]:
    """Measure every model with every division of 1, 2, 4 and so on threads, up to all of them."""
    return [
        _at_rows(subject, rows, replace(setup, lanes=num_lanes, threads=threads))
        for subject in setup.subjects()
        for num_lanes, threads in divisions(setup.threads)
        for rows in setup.rows or ROWS
        if num_lanes <= rows
    ]


def divisions(threads: int) -> list[tuple[int, int]]:
    """Return every pair (lanes, threads of all lanes) of powers of two within `threads`, which is one of them too."""
    totals = sorted({threads, *(1 << power for power in range(threads.bit_length()) if 1 << power <= threads)})
    return [(lanes, total) for total in totals for lanes in totals if lanes <= total and total % lanes == 0]


def _at_rows(subject: Subject, rows: int, setup: Setup) -> Finding:
    runners = setup.runners(subject, rows)
    sources, limit = subject.sources(num_requests(subject, rows)), subject.max_new_tokens
    rates = []
    with Offline(*runners, rows=rows) as offline:
        for _ in range(1 + setup.repeat):
            speed = timed(lambda: offline.translate(sources, concurrency=len(sources), max_new_tokens=limit))
            rates.append(speed.num_tokens / speed.seconds)
    return Finding(
        name="growth",
        case=f"{subject.name}, {len(runners)} x {setup.threads // len(runners)} threads",
        rows=rows,
        antiphon=round(statistics.median(rates[1:]), 1),  # the first run is not measured
        unit="tokens/s",
    )
