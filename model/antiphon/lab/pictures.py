"""Pictures of results: bars of one figure for each setting, curves over steps or lengths, and panels of curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.lab.experiment import Results

Points = Mapping[float, Sequence[float]]
"""Values of each seed at each place of the horizontal axis."""


def bars(results: Results, figure: str, label: str, target: Path, *, marked: str) -> None:
    """Draw a horizontal bar for each setting: mean, standard deviation, and a line at the setting `marked`."""
    names = list(results.trials)
    figure_, axes = _figure(height=1 + 0.3 * len(names))
    means = [results.mean(name, figure) for name in names]
    deviations = [results.deviation(name, figure) for name in names]
    axes.barh(names, means, xerr=deviations, color=["C1" if name == marked else "C0" for name in names])
    axes.axvline(results.mean(marked, figure), color="C1", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel=label)
    _save(figure_, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One part of a picture: series of points by name, and labels as for Axes.set."""

    series: Mapping[str, Points]
    labels: Mapping[str, Any]


def curves(series: Mapping[str, Points], target: Path, **labels: Any) -> None:
    """Draw the mean of each series over seeds, with a band of one standard deviation; labels as for Axes.set."""
    figure, axes = _figure(height=4.5)
    _plot(axes, Panel(series=series, labels=labels))
    _save(figure, target)


def panels(drawn: Sequence[Panel], target: Path) -> None:
    """Draw an even number of panels in rows of two, each as `curves` does."""
    figure, grid = _figure(height=3.6 * (len(drawn) // 2), width=12, nrows=len(drawn) // 2, ncols=2)
    for axes, panel in zip(grid.flat, drawn, strict=True):
        _plot(axes, panel)
    figure.tight_layout()
    _save(figure, target)


def _plot(axes: Any, panel: Panel) -> None:
    for name, points in panel.series.items():
        places = sorted(points)
        means = [statistics.fmean(points[place]) for place in places]
        spread = [statistics.stdev(points[place]) if len(points[place]) > 1 else 0.0 for place in places]
        (line,) = axes.plot(places, means, marker="o", markersize=3, label=name)
        axes.fill_between(
            places,
            [mean - one for mean, one in zip(means, spread, strict=True)],
            [mean + one for mean, one in zip(means, spread, strict=True)],
            color=line.get_color(),
            alpha=0.2,
        )
    axes.set(**panel.labels)
    if panel.labels.get("xscale") == "log":  # measured places are few, and powers of ten are not among them
        places = sorted({place for points in panel.series.values() for place in points})
        axes.set_xticks(places, labels=[f"{place:g}" for place in places])
        axes.xaxis.minorticks_off()
    if panel.series:
        axes.legend(fontsize=8)


def curve_points(results: Results, name: str, figure: str) -> Points:
    """Return a figure of the training log of a setting by step."""
    points: dict[float, list[float]] = {}
    for result in results.trials[name]:
        for record in result.curve:
            points.setdefault(record["step"], []).append(record[figure])
    return points


def _figure(height: float, width: float = 7.5, nrows: int = 1, ncols: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(nrows, ncols, figsize=(width, height))


def _save(figure: Any, target: Path) -> None:
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
