"""Plot of latency and throughput by rate, as PNG. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from antiphon.load.results import Result

_PERCENTS = ("p50", "p95", "p99")


def draw_curve(results: Sequence[Result], highest: float | None = None) -> bytes:
    """Return a PNG with three panels by rate: time to first token, time to the whole answer, answers per second.

    highest: a rate to mark. Runs of a trace are shown at the achieved rate.
    """
    by_rate = sorted(results, key=_rate)
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    first, whole, throughput = figure.subplots(1, 3)
    objective = by_rate[0].plan.objective
    _draw_latency(first, by_rate, "ttft_ms", "time to first token, ms", objective.ttft_s)
    _draw_latency(whole, by_rate, "e2e_ms", "whole answer, ms", objective.e2e_s)
    _draw_throughput(throughput, by_rate)
    for axes in (first, whole, throughput):
        if highest:
            axes.axvline(highest, color="green", linestyle=":", label=f"highest rate within: {highest:,.1f}/s")
        axes.set(xlabel="requests/s", xlim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    plan = by_rate[0].plan
    title = f"{plan.model} on {plan.target}: open loop, {plan.duration_s:g} s a point, latency from the scheduled time"
    figure.suptitle(title, fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _rate(result: Result) -> float:
    return result.sent_per_s if result.plan.rate is None else result.plan.rate


def _draw_latency(axes: Axes, results: Sequence[Result], name: str, label: str, bound_s: float | None) -> None:
    shown = [(_rate(result), latency) for result in results if (latency := getattr(result, name)) is not None]
    for percent in _PERCENTS:
        axes.plot(
            [rate for rate, _ in shown],
            [getattr(latency, percent) for _, latency in shown],
            "o-",
            label=percent,
        )
    if bound_s is not None:
        axes.axhline(
            1e3 * bound_s, color="black", linestyle="--", linewidth=1, label=f"objective, {1e3 * bound_s:g} ms"
        )
    axes.set(ylabel=label, yscale="log")  # beyond saturation, latencies grow a hundredfold


def _draw_throughput(axes: Axes, results: Sequence[Result]) -> None:
    rates = [_rate(result) for result in results]
    axes.plot(rates, rates, color="black", linewidth=1, label="as asked")
    axes.plot(rates, [result.ok_per_s for result in results], "o-", label="answered")
    if results[0].plan.objective.has_limit:
        axes.plot(rates, [result.goodput_per_s or 0.0 for result in results], "s--", label="within the objective")
    axes.set(ylabel="answers/s", ylim=(0, None))
