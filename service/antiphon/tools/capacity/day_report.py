"""Figures of a simulated day, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.tools.capacity.fleet import Outcome
from antiphon.tools.capacity.simulated_replica import ServiceCurve
from antiphon.tools.capacity.traffic import Floats, Traffic

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
