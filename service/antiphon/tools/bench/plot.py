"""Plots of the sections decode and growth: tokens per second by number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from antiphon.tools.bench.report import BenchError, Finding


def plot_decode(path: Path, findings: Sequence[Finding], title: str) -> None:
    """Write a PNG with two panels, the speed of both sides and their ratio. Findings of other sections are ignored."""
    shown = [found for found in findings if found.name == "decode" and found.unit == "tokens/s" and found.ratio]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, ratio = figure.subplots(1, 2)
    for case in dict.fromkeys(found.case for found in shown):
        of_case = sorted((found for found in shown if found.case == case), key=lambda found: found.rows)
        rows = [found.rows for found in of_case]
        lines = speed.plot(rows, [found.antiphon for found in of_case], "o-", label=f"Antiphon, {case}")
        color = lines[0].get_color()
        speed.plot(
            rows, [found.ctranslate2 or 0 for found in of_case], "s--", color=color, label=f"CTranslate2, {case}"
        )
        ratio.plot(rows, [found.ratio or 0 for found in of_case], "o-", color=color, label=case)
    ratio.axhline(1, color="black", linewidth=1)
    ticks = sorted({found.rows for found in shown})
    for axes, label in ((speed, "target tokens/s"), (ratio, "Antiphon over CTranslate2")):
        axes.set(xlabel="rows", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(ticks, [str(rows) for rows in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    _save(figure, path, title)


def plot_growth(path: Path, findings: Sequence[Finding], title: str) -> None:
    """Write a PNG with one line for each division of the threads. Findings of other sections are ignored."""
    shown = [found for found in findings if found.name == "growth"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for case in dict.fromkeys(found.case for found in shown):
        of_case = sorted((found for found in shown if found.case == case), key=lambda found: found.rows)
        axes.plot([found.rows for found in of_case], [found.antiphon for found in of_case], "o-", label=case)
    ticks = sorted({found.rows for found in shown})
    axes.set(xlabel="rows", ylabel="target tokens/s", xscale="log", ylim=(0, None))
    axes.set_xticks(ticks, [str(rows) for rows in ticks])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path, title)


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise BenchError(f"--plot {path} cannot be written: {error}") from None
