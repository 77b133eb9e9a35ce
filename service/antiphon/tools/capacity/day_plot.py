"""Plot of a simulated day, as PNG. Needs matplotlib."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from antiphon.tools.capacity.fleet import Outcome
from antiphon.tools.capacity.simulated_replica import ServiceCurve

_HOUR_S = 3600.0
_WINDOW_S = 300.0


def draw_day(cases: list[tuple[str, Outcome]], curve: ServiceCurve) -> bytes:
    """Plot the rate and capacity of the first case, the replicas of the first and last, and the waits of the first."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    rate, replicas, waits = figure.subplots(3, 1, sharex=True)
    name, outcome = cases[0]
    _draw_rate(rate, name, outcome, curve)
    for label, case in cases[:1] + cases[-1:]:  # more lines would hide each other
        hours = [sample.time_s / _HOUR_S for sample in case.samples]
        replicas.step(hours, [sample.replicas for sample in case.samples], where="post", label=label, linewidth=1)
    replicas.set(ylabel="replicas", ylim=(0, None))
    _draw_waits(waits, name, outcome)
    for axes in (rate, replicas, waits):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left", ncols=3)
    waits.set(xlabel="hour of the day")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80)
    return content.getvalue()


def _draw_rate(axes: Axes, name: str, outcome: Outcome, curve: ServiceCurve) -> None:
    hours = [sample.time_s / _HOUR_S for sample in outcome.samples]
    axes.plot(hours, [sample.rate for sample in outcome.samples], linewidth=1, label="requests/s")
    capacity = [sample.ready * curve.highest_per_s for sample in outcome.samples]
    axes.step(hours, capacity, where="post", linewidth=1, label=f"most that ready replicas answer, {name}")
    axes.set(ylabel="requests/s", ylim=(0, None))


def _draw_waits(axes: Axes, name: str, outcome: Outcome) -> None:
    """Plot median and 99th percentile of waits, and the rate of refusals, over windows of five minutes."""
    arrived_s, wait_s = np.array(outcome.answers.arrived_s), np.array(outcome.answers.wait_s)
    refused_s = np.array(outcome.answers.refused_s)
    window = (arrived_s // _WINDOW_S).astype(int)
    order = np.argsort(window, kind="stable")
    windows, starts = np.unique(window[order], return_index=True)
    parts = np.split(wait_s[order], starts[1:])
    hours = windows * _WINDOW_S / _HOUR_S
    for percent in (50, 99):
        axes.plot(
            hours, [np.percentile(part, percent) for part in parts], linewidth=1, label=f"wait p{percent}, {name}"
        )
    axes.set(ylabel="wait, s", ylim=(0, None))
    if len(refused_s):
        counts = np.bincount((refused_s // _WINDOW_S).astype(int))
        beside = axes.twinx()
        beside.plot(np.arange(len(counts)) * _WINDOW_S / _HOUR_S, counts / _WINDOW_S, color="tab:red", linewidth=1)
        beside.set(ylim=(0, None))
        beside.set_ylabel("refused/s", color="tab:red")
