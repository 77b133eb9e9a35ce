"""Panels of requests and their outcomes."""

from __future__ import annotations

from deploy.dashboards.queries import of_model, of_process, rate, rising, total
from deploy.dashboards.shapes import About, Panel, lines


def panels() -> list[Panel]:
    """Return panels of requests by outcome and kind, tokens, and reasons of failures."""
    return [*_requests(), *_losses(), *_calls()]


OUTCOME = About(
    title="Requests by outcome",
    text="Requests by their outcome. Good: all answered. Refusals with QUEUE_FULL while requests wait: overload.",
    unit="reqps",
    width=12,
    runbook="AntiphonAvailabilityBudgetFast",
)
TOKENS = About(
    title="Tokens",
    text="Work of encoder (source) and decoder (target). Padding is wasted work; native graphs have none.",
    unit="short",
    width=12,
)


def _requests() -> list[Panel]:
    outcomes = {
        "answered": "request_success_total",
        "refused": "requests_refused_total",
        "cancelled": "cancellations_total",
        "deadline missed": "deadline_misses_total",
        "failed": "request_errors_total",
    }
    kinds = {"source": "prompt_tokens_total", "target": "generation_tokens_total", "padding": "padding_tokens_total"}
    return [
        lines(OUTCOME, {legend: total(rate(of_model(name))) for legend, name in outcomes.items()}, is_stacked=True),
        lines(TOKENS, {legend: total(rate(of_model(name))) for legend, name in kinds.items()}),
    ]


REFUSED = About(
    title="Refusals by reason",
    text="Refused calls. QUEUE_FULL, TOO_MANY_RPCS and TOO_MANY_TEXTS: overload. INVALID_FIELD: a client's mistake.",
    unit="reqps",
    runbook="AntiphonRefusing",
)
CANCELLED = About(
    title="Cancellations",
    text="Cancelled requests. client, waiting: users give up; slow_reader: a client or its network is stuck.",
    unit="reqps",
    runbook="AntiphonSlowReaders",
)
LATE = About(
    title="Deadline misses",
    text="By stage. submit: expired on arrival; waiting: too much load; running: deadlines too short. Good: none.",
    unit="reqps",
    runbook="AntiphonQueueWaitHigh",
)


def _losses() -> list[Panel]:
    return [
        lines(REFUSED, {"{{reason}}": _by("reason", "requests_refused_total")}),
        lines(CANCELLED, {"{{cause}}, {{stage}}": _by("cause, stage", "cancellations_total")}),
        lines(LATE, {"{{stage}}": _by("stage", "deadline_misses_total")}),
    ]


ASKED = About(
    title="Requests by task and priority",
    text="Accepted requests. Interactive requests go first when the queue grows.",
    unit="reqps",
)
ENDED = About(
    title="Outputs by finish reason",
    text="Finish reasons. Good: nearly all are stop; an increase of length means answers that are cut off.",
    unit="reqps",
)
CODES = About(
    title="RPCs by status",
    text="Every RPC of every service. INTERNAL and UNKNOWN are faults of the server: read its log.",
    unit="reqps",
    runbook="AntiphonErrors",
)


def _calls() -> list[Panel]:
    handled = total(rate(of_process("antiphon_grpc_server_handled_total")), "code")
    return [
        lines(ASKED, {"{{task}}, {{priority}}": _by("task, priority", "requests_submitted_total")}),
        lines(ENDED, {"{{finished_reason}}": _by("finished_reason", "request_success_total")}),
        lines(CODES, {"{{code}}": rising(handled)}),
    ]


def _by(labels: str, name: str) -> str:
    return rising(total(rate(of_model(name)), labels))
