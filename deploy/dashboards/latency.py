"""Panels of latency and its parts."""

from __future__ import annotations

from deploy.dashboards.queries import STEP, of_model, quantile, total
from deploy.dashboards.shapes import BAD, GOOD, WARNING, About, Panel, cells, lines

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


FIRST = About(
    title="Time to first token",
    text="Time in the queue, in the encoder and in one step. Good: p99 below 0.5 s; otherwise see time in the queue.",
    unit="s",
    width=6,
    runbook="AntiphonFirstTokenSlow",
)
BETWEEN = About(
    title="Time between tokens",
    text="It grows with the rows of a step. Good: p99 below 25 ms. Preempted requests cause a long tail.",
    unit="s",
    width=6,
    runbook="AntiphonInterTokenSlow",
)
WHOLE = About(
    title="Whole answers",
    text="Time from arrival to the end of the answer. It grows with the length of the answer.",
    unit="s",
    width=6,
    runbook="AntiphonAnswerSlow",
)
QUEUE = About(
    title="Time in the queue",
    text="The part of the latency that more replicas reduce. Good: p99 of a few milliseconds.",
    unit="s",
    width=6,
    runbook="AntiphonQueueWaitHigh",
)


def panels() -> list[Panel]:
    """Return panels with percentiles of each latency, and the distribution of the time to first token."""
    return [
        lines(FIRST, _percentiles("time_to_first_token_seconds"), limits=[(0, GOOD), (0.5, WARNING), (2, BAD)]),
        lines(BETWEEN, _percentiles("inter_token_latency_seconds"), limits=[(0, GOOD), (0.025, WARNING), (0.1, BAD)]),
        lines(WHOLE, _percentiles("e2e_request_latency_seconds")),
        lines(QUEUE, _percentiles("request_queue_time_seconds")),
        _spread(),
    ]


def _percentiles(histogram: str) -> dict[str, str]:
    return {legend: quantile(share, histogram) for legend, share in SHARES.items()}


ABOUT = About(
    title="Time to first token, distribution",
    text="Number of first tokens in each bucket. Two bands mean two kinds of requests, or replicas that differ.",
    unit="s",
    width=24,
    height=7,
)


def _spread() -> Panel:
    return cells(ABOUT, total(f"increase({of_model('time_to_first_token_seconds_bucket')}[{STEP}])", "le"))
