"""Reports of results: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from antiphon.load.mlperf_summary import Verdict
from antiphon.load.plan import Plan
from antiphon.load.results import MAX_LAG_MS, Percentiles, Result

_LATENCIES = (
    ("first token", "ttft_ms"),
    ("between messages", "inter_token_ms"),
    ("per token", "per_token_ms"),
    ("whole answer", "e2e_ms"),
    ("sent late by", "lag_ms"),
)
_HEADER = ("ms", "p50", "p90", "p95", "p99", "p99.9", "max")
_CURVE = ("rate/s", "sent/s", "ok/s", "goodput/s", "tokens/s", "failed", "TTFT p50", "p99", "e2e p50", "p95", "p99")
_MAX_SHOWN = 60


def as_text(result: Result) -> str:
    """Return a table of one run."""
    lines = [_counts(result), _rates(result), *_errors(result), "", *_latencies(result)]
    if result.plan.check:
        lines += ["", *_checked(result)]
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, Any]:
    """Return one run as plain data; latencies in milliseconds, rates per second."""
    plan = result.plan
    return {
        **_plan_fields(plan),
        "interrupted": result.is_interrupted,
        "scheduled": result.num_scheduled,
        "sent": result.num_sent,
        "ok": result.num_ok,
        "errors": result.errors,
        "error_reasons": result.error_reasons,
        "with_pushback": result.num_pushbacks,
        "unfinished": result.num_unfinished,
        "dropped": result.num_dropped,
        "error_share": result.error_share,
        "sent_per_second": result.sent_per_s,
        "ok_per_second": result.ok_per_s,
        "tokens_per_second": result.tokens_per_s,
        "goodput_per_second": result.goodput_per_s,
        **{name: None if latency is None else asdict(latency) for name, latency in _percentiles(result).items()},
        "objective": asdict(plan.objective) | {"met": result.has_met_objective},
        "client_kept_up": result.has_kept_up,
        "checked": _check(result) if plan.check else None,
    }


def mlperf_as_text(verdict: Verdict) -> str:
    """Return LoadGen's verdict and figures as text."""
    summary = verdict.summary
    lines = [f"LoadGen: {'VALID' if verdict.is_valid else 'INVALID'}"]
    lines += [f"  not satisfied: {name.removesuffix(' satisfied')}" for name in summary.missed]
    lines += [f"  {count} failed: {status}" for status, count in verdict.errors.items()]
    tokens = "" if summary.tokens_per_s is None else f", {summary.tokens_per_s:,.0f} tokens/s"
    lines += [f"asked for {summary.scheduled_per_s:,.1f}/s, answered {summary.completed_per_s:,.1f}/s{tokens}", ""]
    names = list(summary.percentiles_ms["e2e_ms"])
    rows = [
        (label, *(f"{summary.percentiles_ms[key][name]:.1f}" for name in names))
        for label, key in _LATENCIES
        if key in summary.percentiles_ms
    ]
    return "\n".join([*lines, *_columns([("ms", *(name.replace("_", ".") for name in names)), *rows])])


def mlperf_as_json(plan: Plan, verdict: Verdict) -> dict[str, Any]:
    """Return LoadGen's verdict and figures as plain data; latencies in milliseconds, rates per second."""
    summary = verdict.summary
    return {
        **_plan_fields(plan),
        "valid": verdict.is_valid,
        "missed": list(summary.missed),
        "errors": verdict.errors,
        "sent_per_second": summary.scheduled_per_s,
        "ok_per_second": summary.completed_per_s,
        "tokens_per_second": summary.tokens_per_s,
        **summary.percentiles_ms,
        "objective": asdict(plan.objective),
    }


def curve(results: Sequence[Result]) -> str:
    """Return a table with a line for each run, lowest rate first; latencies in milliseconds."""
    rows = [_curve_row(result) for result in sorted(results, key=lambda result: result.plan.rate or 0)]
    return "\n".join(_columns([_CURVE, *rows]))


def warnings(result: Result) -> list[str]:
    """Return warnings about a result that may be wrong."""
    lines = []
    if result.num_dropped:
        limit = f"--max-outstanding {result.plan.max_outstanding}"
        lines.append(
            f"{result.num_dropped} requests were not sent: {limit} were running, or the client was far too late"
        )
    if result.lag_ms is not None and result.lag_ms.p99 > MAX_LAG_MS:
        lines.append(
            f"the client cannot keep up: it sent 1 % of the requests more than {result.lag_ms.p99:.0f} ms late, which "
            f"their latencies include; try --processes {2 * result.plan.processes}, or another machine"
        )
    return lines


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {
        "target": plan.target,
        "model": plan.model,
        "rate": plan.rate,
        "duration_s": plan.duration_s,
        "warmup_s": plan.warmup_s,
        "seed": plan.seed,
        "processes": plan.processes,
        "connections": plan.connections,
        "streaming": plan.is_streaming,
        "multiplexed": plan.is_multiplexed,
        "priority": plan.priority,
    }


def _counts(result: Result) -> str:
    rare = {"unfinished": result.num_unfinished, "not sent": result.num_dropped}
    counts = {"sent": result.num_sent, "ok": result.num_ok, "failed": sum(result.errors.values())}
    return ", ".join(f"{name} {count}" for name, count in {**counts, **rare}.items() if count or name in counts)


def _rates(result: Result) -> str:
    rate, goodput = result.plan.rate, result.goodput_per_s
    parts = [
        "arrivals of a trace" if rate is None else f"asked for {rate:,.1f}/s",
        f"sent {result.sent_per_s:,.1f}/s",
        f"answered {result.ok_per_s:,.1f}/s",
        *([] if goodput is None else [f"within the objective {goodput:,.1f}/s"]),
        f"{result.tokens_per_s:,.0f} tokens/s",
    ]
    return ", ".join(parts)


def _errors(result: Result) -> list[str]:
    lines = []
    for outcome, message in result.record.messages.items():
        kind = "/".join(filter(None, (outcome.status, outcome.reason)))
        lines.append(f"  {result.error_reasons[kind]} {kind}: {message}")
    return lines


def _percentiles(result: Result) -> dict[str, Percentiles | None]:
    return {name: getattr(result, name) for _, name in _LATENCIES}


def _latencies(result: Result) -> list[str]:
    latencies = _percentiles(result)
    rows = [
        (label, *(f"{value:.1f}" for value in asdict(percentiles).values()))
        for label, name in _LATENCIES
        if (percentiles := latencies[name]) is not None
    ]
    return _columns([_HEADER, *rows])


def _check(result: Result) -> dict[str, Any]:
    record = result.record
    return {
        "compared": record.num_compared,
        "mismatches": record.num_mismatches,
        "examples": [
            {"source": result.plan.asks[mismatch.ask].source, "first": mismatch.first, "other": mismatch.other}
            for mismatch in record.mismatches
        ],
    }


def _checked(result: Result) -> list[str]:
    record = result.record
    if not record.num_mismatches:
        return [f"answers to equal texts are equal ({record.num_compared} compared)"]
    lines = [f"{record.num_mismatches} of {record.num_compared} answers differ from another to the same text:"]
    for mismatch in record.mismatches:
        lines.append(f"  {str(result.plan.asks[mismatch.ask].source)[:_MAX_SHOWN]!r}")
        lines += [f"    {answer[:_MAX_SHOWN]!r}" for answer in (mismatch.first, mismatch.other)]
    return lines


def _curve_row(result: Result) -> tuple[str, ...]:
    goodput = result.goodput_per_s
    return (
        f"{result.plan.rate:,.1f}",
        f"{result.sent_per_s:,.1f}",
        f"{result.ok_per_s:,.1f}",
        "" if goodput is None else f"{goodput:,.1f}",
        f"{result.tokens_per_s:,.0f}",
        f"{result.error_share:.1%}",
        *_shown_percentiles(result.ttft_ms, "p50", "p99"),
        *_shown_percentiles(result.e2e_ms, "p50", "p95", "p99"),
    )


def _shown_percentiles(percentiles: Percentiles | None, *names: str) -> list[str]:
    return ["" if percentiles is None else f"{getattr(percentiles, name):.1f}" for name in names]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows in columns of the width of their longest entry; the first aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
