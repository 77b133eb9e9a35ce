"""Report of an experiment: a JSON, a section of RESULTS.md with tables and claims, a picture of bars or curves."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.trial import machine

_VERDICTS = {True: "holds", False: "**contradicted**", None: "not decided"}


def write_report(experiment: Experiment, results: Results, setting: Setting, command: str) -> str:
    """Write NAME.json, NAME.png and the experiment's section of RESULTS.md to the output folder; return the section."""
    claims = list(experiment.claims(results))
    described = {
        "experiment": experiment.name,
        "question": experiment.question,
        "command": command,
        "scale": setting.scale,
        "seeds": setting.seeds,
        "trials": [asdict(result) for group in results.trials.values() for result in group],
        "alone": results.alone,
        "claims": [asdict(claim) for claim in claims],
    }
    path = setting.output / f"{experiment.name}.json"
    path.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    experiment.draw(results, path.with_suffix(".png"))
    section = "\n".join(_section(experiment, results, claims, command)) + "\n"
    page = setting.output / "RESULTS.md"
    former = page.read_text(encoding="utf-8") if page.exists() else "# Results of the laboratory\n"
    page.write_text(_with_section(former, section), encoding="utf-8")
    return section


def _with_section(page: str, section: str) -> str:
    """Return the page with this section in place of the one with the same heading, or at its end."""
    heading = section.partition("\n")[0]
    parts = [part.strip("\n") for part in re.split(r"^(?=## )", page, flags=re.M)]
    places = [index for index, part in enumerate(parts) if part.partition("\n")[0] == heading]
    place = places[0] if places else len(parts)
    parts[place : place + 1] = [section.strip("\n")]
    return "\n\n".join(parts) + "\n"


def _section(experiment: Experiment, results: Results, claims: Sequence[Claim], command: str) -> list[str]:
    first = next(iter(results.trials.values()), ())
    return [
        f"## {experiment.name}",
        "",
        experiment.question,
        "",
        f"![{experiment.name}]({experiment.name}.png)",
        "",
        *table(experiment, results),
        "",
        f"Mean and standard deviation over {len(first)} seeds." if len(first) > 1 else "One seed.",
        "",
        *claim_table(claims),
        "",
        *_tables_alone(results),
        f"    {command}",
        "",
        *_machines(results),
    ]


def _machines(results: Results) -> list[str]:
    """Return a line for each machine of the trials, with its seeds if there are several, and one for figures alone."""
    seeds: dict[str, set[int]] = {}
    for result in (result for group in results.trials.values() for result in group):
        seeds.setdefault(result.machine, set()).add(result.seed)
    if len(seeds) == 1:
        lines = [f"On {name}." for name in seeds]
    else:
        lines = [f"- seed {', '.join(map(str, sorted(numbers)))}: {name}" for name, numbers in seeds.items()]
    return lines + ([f"- figures measured alone: {machine()}"] if results.alone and [*seeds] != [machine()] else [])


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return the lines of the table: a row for each setting, a column for each figure."""
    headings = ["setting", *(heading for heading, _ in experiment.columns.values())]
    rows = []
    for name, group in results.trials.items():
        diverged = sum(result.diverged is not None for result in group)
        cells = [results.shown(name, figure, f".{decimals}f") for figure, (_, decimals) in experiment.columns.items()]
        note = f" ({diverged} of {len(group)} diverged)" if diverged else ""
        rows.append([f"{name}{note}", *cells])
    return _lines(headings, rows)


def _tables_alone(results: Results) -> list[str]:
    """Return the lines of the tables of figures that were measured alone, each with an empty line at the end."""
    lines: list[str] = []
    for title, rows in results.alone.items():
        headings = list(next(iter(rows.values())))
        cells = [[name, *(f"{values[heading]:.4g}" for heading in headings)] for name, values in rows.items()]
        lines += [*_lines([title, *headings], cells), ""]
    return lines


def claim_table(claims: Sequence[Claim]) -> list[str]:
    """Return the lines of the table of claims; empty without claims."""
    rows = [[claim.source, claim.claim, claim.measured, _VERDICTS[claim.holds]] for claim in claims]
    return _lines(["source", "claim", "measured", "verdict"], rows) if rows else []


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


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
            [mean - deviation for mean, deviation in zip(means, spread, strict=True)],
            [mean + deviation for mean, deviation in zip(means, spread, strict=True)],
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
