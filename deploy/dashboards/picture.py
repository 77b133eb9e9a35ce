"""Plots the dashboard's expressions from a Prometheus, for the docs: not a picture of Grafana, but the same figures.

python -m deploy.dashboards.picture http://127.0.0.1:9091 docs/dashboard.png MINUTES
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deploy.dashboards.dashboard import TARGET
from deploy.dashboards.queries import filled

NUM_COLUMNS, INCHES_A_COLUMN, INCHES_A_ROW = 24, 0.62, 0.3
COLOURS = {"green": "#56a64b", "orange": "#e0812e", "red": "#c4162a"}
MAX_SERIES = 12


class Answers:
    """Answers of a Prometheus about the last minutes."""

    def __init__(self, url: str, minutes: float) -> None:
        self._url = url
        self.end_s = time.time()
        self._span_s = 60 * minutes

    def over_time(self, expression: str) -> list[Any]:
        """Return the series of an expression: labels and points."""
        start_s, step_s = self.end_s - self._span_s, max(1.0, self._span_s / 120)
        return self._ask("query_range", expression, start=start_s, end=self.end_s, step=step_s)

    def now(self, expression: str) -> dict[str, float]:
        """Return the value of an expression at the end, by its label values."""
        found = self._ask("query", expression, time=self.end_s)
        return {", ".join(one["metric"].values()): float(one["value"][1]) for one in found}

    def _ask(self, path: str, expression: str, **parameters: float) -> list[Any]:
        query = filled(expression, step="30s", span=f"{self._span_s:.0f}s")
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode({'query': query, **parameters})}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return list(json.load(response)["data"]["result"])


def main() -> None:
    """Draw all panels and write the picture."""
    url, target, minutes = sys.argv[1], sys.argv[2], float(sys.argv[3])
    panels = json.loads(TARGET.read_text(encoding="utf-8"))["panels"]
    draw(panels, Answers(url, minutes)).savefig(target, dpi=80)


def draw(panels: Sequence[Any], answers: Answers) -> Figure:
    """Draw the panels of the dashboard's JSON at the positions that Grafana uses."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    mpl.rc("font", size=6.5)
    mpl.rc("axes", titlesize=8, titlelocation="left")
    figure = Figure(figsize=(NUM_COLUMNS * INCHES_A_COLUMN, height * INCHES_A_ROW))
    for panel in panels:
        at, has_axes = panel["gridPos"], panel["type"] in ("timeseries", "heatmap", "xychart")
        left, below = (0.8, 0.9) if has_axes else (0.1, 0.1)
        x, y = at["x"] + left, height - at["y"] - at["h"] + below
        wide, high = at["w"] - left - 0.3, max(at["h"] - below - 1, 0.1)
        axes = figure.add_axes((x / NUM_COLUMNS, y / height, wide / NUM_COLUMNS, high / height))
        axes.set_title(panel["title"], fontweight="bold" if panel["type"] == "row" else "normal")
        _DRAWN[panel["type"]](axes, panel, answers)
    return figure


def _row(axes: Axes, panel: Any, answers: Answers) -> None:
    axes.axis("off")
    axes.axhline(0, color="grey")


def _stat(axes: Axes, panel: Any, answers: Answers) -> None:
    value = next(iter(answers.now(panel["targets"][0]["expr"]).values()), math.nan)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    axes.set_facecolor(COLOURS[passed[-1]])
    axes.set(xticks=[], yticks=[])
    text = _unit(panel)(value, None)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=17, color="white", transform=axes.transAxes)


def _lines(axes: Axes, panel: Any, answers: Answers) -> None:
    answered = [
        (target["legendFormat"], one) for target in panel["targets"] for one in answers.over_time(target["expr"])
    ]
    for legend, one in answered[:MAX_SERIES]:
        minutes = [(float(at) - answers.end_s) / 60 for at, _ in one["values"]]
        values = [float(value) for _, value in one["values"]]
        axes.plot(minutes, values, linewidth=1, label=_named(legend, one["metric"]))
    if "scaleDistribution" in panel["fieldConfig"]["defaults"].get("custom", {}):
        axes.set_yscale("log", base=2)
    else:
        axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1], 1e-3))  # room for the legend
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.yaxis.set_major_formatter(FuncFormatter(_unit(panel)))
    axes.grid(alpha=0.3)
    if answered:
        axes.legend(loc="upper left", fontsize=5, ncols=2)


def _named(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend).strip()


def _heat(axes: Axes, panel: Any, answers: Answers) -> None:
    found = sorted(answers.over_time(panel["targets"][0]["expr"]), key=lambda one: float(one["metric"]["le"]))
    cumulated = [[float(value) for _, value in one["values"]] for one in found]
    nothing = [0.0] * len(cumulated[0])
    rows = [[b - a for a, b in zip(lower, upper, strict=True)] for lower, upper in pairwise([nothing, *cumulated])]
    axes.imshow(rows, aspect="auto", origin="lower", cmap="Oranges")
    axes.set_yticks(range(len(found)), [one["metric"]["le"] for one in found])
    axes.set_xticks([])


def _columns(panel: Any, answers: Answers) -> dict[str, dict[str, float]]:
    """Return the answers of a panel with joined queries, by the names of its columns."""
    names = panel["transformations"][1]["options"]["renameByName"]
    return {names[f"Value #{target['refId']}"]: answers.now(target["expr"]) for target in panel["targets"]}


def _curves(axes: Axes, panel: Any, answers: Answers) -> None:
    columns = _columns(panel, answers)
    x = columns.pop("tokens")
    for name, y in columns.items():
        points = sorted((x[key], y[key]) for key in x.keys() & y.keys())
        axes.plot([point[0] for point in points], [point[1] for point in points], "o-", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("source tokens")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(_unit(panel)))
    axes.grid(alpha=0.3)
    axes.legend()


def _table(axes: Axes, panel: Any, answers: Answers) -> None:
    axes.axis("off")
    if len(panel["targets"]) == 1:
        listed = "\n".join(answers.now(panel["targets"][0]["expr"]))
        axes.text(0.05, 0.9, listed, va="top", transform=axes.transAxes)
        return
    columns = _columns(panel, answers)
    first, *_ = columns.values()
    units = [_BYTES if name not in ("tokens", "runs") else _short for name in columns]
    keys = sorted(set(chain.from_iterable(columns.values())), key=lambda key: first.get(key, math.inf))
    cells = [
        [unit(values.get(key, math.nan), None) for unit, values in zip(units, columns.values(), strict=True)]
        for key in keys
    ]
    axes.table(cells, rowLabels=keys, colLabels=list(columns), loc="upper center")


def _unit(panel: Any) -> Callable[[float, Any], str]:
    return _UNITS.get(panel["fieldConfig"]["defaults"]["unit"], _short)


def _scaled(factor: float, *names: str) -> Callable[[float, Any], str]:
    def text(value: float, _: Any) -> str:
        place = min(len(names) - 1, int(math.log(value, factor))) if value >= factor else 0
        return f"{value / factor**place:.3g}{names[place]}"

    return text


def _seconds(value: float, _: Any) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _percent(value: float, _: Any) -> str:
    return f"{100 * value:.3g} %"


_short = _scaled(1000, "", "k", "M", "G")
_BYTES = _scaled(1024, " B", " KiB", " MiB", " GiB")
_UNITS = {"s": _seconds, "bytes": _BYTES, "percentunit": _percent}
_DRAWN = {
    "row": _row, "stat": _stat, "timeseries": _lines, "heatmap": _heat, "xychart": _curves, "table": _table,
}  # fmt: skip

if __name__ == "__main__":
    main()
