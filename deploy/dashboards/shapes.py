"""Kinds of panels, one function each. Every panel has a title, a description, a size and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries, xychart
from grafana_foundation_sdk.builders import dashboard as built
from grafana_foundation_sdk.models import common as commons
from grafana_foundation_sdk.models import dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.xychart import SeriesMapping, XYShowMode

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
GOOD, WARNING, BAD = "green", "orange", "red"
Panel = stat.Panel | timeseries.Panel | heatmap.Panel | table.Panel | xychart.Panel
P = TypeVar("P", stat.Panel, timeseries.Panel, heatmap.Panel, table.Panel, xychart.Panel)
J = TypeVar("J", table.Panel, xychart.Panel)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Properties of every panel. unit: Grafana's id. width: columns, of 24. runbook: alert in docs/RUNBOOK.md."""

    title: str
    text: str
    unit: str
    width: int = 8
    height: int = 8
    runbook: str | None = None


def number(about: About, expression: str, steps: Sequence[tuple[float, str]], *, decimals: int = 0) -> stat.Panel:
    """Return a panel with one number, coloured by its thresholds, and its history behind it."""
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().reduce_options(reduced).color_mode(commons.BigValueColorMode.BACKGROUND)
    panel = panel.graph_mode(commons.BigValueGraphMode.AREA).thresholds(thresholds(steps)).no_value("idle")
    return _described(panel, about).decimals(decimals).with_target(_query("A", expression, about.title))


def lines(
    about: About,
    queries: Mapping[str, str],
    *,
    is_stacked: bool = False,
    limits: Sequence[tuple[float, str]] = (),
    is_logarithmic: bool = False,
) -> timeseries.Panel:
    """Return a panel with lines over time. queries: expression by legend. limits: thresholds, drawn as lines."""
    panel = _described(timeseries.Panel(), about).line_width(1).fill_opacity(60 if is_stacked else 8)
    panel = panel.show_points(commons.VisibilityMode.NEVER).tooltip(
        common.VizTooltipOptions().mode(commons.TooltipDisplayMode.MULTI).sort(commons.SortOrder.DESCENDING)
    )
    panel = panel.scale_distribution(_logarithmic()) if is_logarithmic else panel.min(0)
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(commons.StackingMode.NORMAL))
    if limits:
        panel = panel.thresholds(thresholds(limits)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(commons.GraphThresholdsStyleMode.DASHED)
        )
    for ref, (legend, expression) in zip(ascii_uppercase, queries.items(), strict=False):
        panel = panel.with_target(_query(ref, expression, legend))
    return panel


def cells(about: About, expression: str) -> heatmap.Panel:
    """Return a heat map of a histogram over time; darker means more observations. expression: increases by le."""
    panel = _described(heatmap.Panel(), about).calculate(False).hide_legend()
    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    panel = panel.color(colours).y_axis(heatmap.YAxisConfig().unit(about.unit)).cell_gap(1)
    return panel.with_target(_query("A", expression, "{{le}}").format(PromQueryFormat.HEATMAP))


def rows(about: About, queries: Mapping[str, str], *, key: str, units: Mapping[str, str]) -> table.Panel:
    """Return a table of current numbers: a row for each value of the label `key`, a column for each query."""
    panel = _joined(_described(table.Panel(), about), list(queries), key)
    for ref, expression in zip(ascii_uppercase, queries.values(), strict=False):
        panel = panel.with_target(_query(ref, expression, "").instant().format(PromQueryFormat.TABLE))
    for column, unit in units.items():
        panel = panel.override_by_name(column, [dashboard.DynamicConfigValue("unit", unit)])
    return panel


def listing(about: About, expression: str) -> table.Panel:
    """Return a table of the labels of the current series; their values are not shown."""
    panel = _described(table.Panel(), about).with_target(
        _query("A", expression, "").instant().format(PromQueryFormat.TABLE)
    )
    hidden = {"excludeByName": {"Time": True, "Value": True}}
    return panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=hidden))


def curves(about: About, queries: Mapping[str, str], *, key: str, x: str) -> xychart.Panel:
    """Return curves of all other queries over the query named x, joined by the label `key`, on logarithmic axes."""
    panel = _joined(_described(xychart.Panel(), about), list(queries), key)
    for ref, expression in zip(ascii_uppercase, queries.values(), strict=False):
        panel = panel.with_target(_query(ref, expression, "").instant().format(PromQueryFormat.TABLE))
    panel = panel.mapping(SeriesMapping.MANUAL).show(XYShowMode.POINTS_AND_LINES).scale_distribution(_logarithmic())
    panel = panel.legend(common.VizLegendOptions().show_legend(True).placement(commons.LegendPlacement.BOTTOM))
    panel = panel.series([_curve(name, x) for name in queries if name != x])
    return panel.override_by_name(
        x, [dashboard.DynamicConfigValue("unit", "short"), dashboard.DynamicConfigValue("custom.axisLabel", x)]
    )


def thresholds(steps: Sequence[tuple[float, str]]) -> built.ThresholdsConfig:
    """Return colours by their lowest values. The value of the first one counts as minus infinity."""
    (_, first), *rest = steps
    found = [
        dashboard.Threshold(value=None, color=first),
        *(dashboard.Threshold(value, color) for value, color in rest),
    ]
    return built.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(found)


def _described(panel: P, about: About) -> P:
    panel.title(about.title).description(about.text).unit(about.unit).span(about.width).height(about.height)
    panel.datasource(SOURCE)
    if about.runbook is not None:
        url = f"${{docs}}/RUNBOOK.md#{about.runbook.lower()}"
        panel.links([built.DashboardLink("Runbook").type(dashboard.DashboardLinkType.LINK).url(url).target_blank(True)])
    return panel


def _query(ref: str, expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).ref_id(ref).legend_format(legend).datasource(SOURCE)


def _joined(panel: J, columns: Sequence[str], key: str) -> J:
    """Join queries side by side, with a row for each value of `key`. Prometheus names the columns `Value #A`, etc."""
    renamed = {f"Value #{ref}": column for ref, column in zip(ascii_uppercase, columns, strict=False)}
    hidden = {"Time": True} | {f"Time {number}": True for number in range(1, len(columns) + 1)}
    steps: Sequence[tuple[str, object]] = (
        ("joinByField", {"byField": key, "mode": "outer"}),
        ("organize", {"renameByName": renamed, "excludeByName": hidden}),
        ("sortBy", {"sort": [{"field": columns[0]}]}),
    )
    for name, options in steps:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val=name, options=options))
    return panel


def _curve(name: str, x: str) -> xychart.XYSeriesConfig:
    first = xychart.XychartXYSeriesConfigFrame().matcher(xychart.MatcherConfig().id("byIndex").options(0))
    return (
        xychart.XYSeriesConfig()
        .name(xychart.XychartXYSeriesConfigName().fixed(name))
        .frame(first)
        .x(xychart.XychartXYSeriesConfigX().matcher(_named(x)))
        .y(xychart.XychartXYSeriesConfigY().matcher(_named(name)))
    )


def _named(field: str) -> xychart.MatcherConfig:
    return xychart.MatcherConfig().id("byName").options(field)


def _logarithmic() -> common.ScaleDistributionConfig:
    return common.ScaleDistributionConfig().type(commons.ScaleDistribution.LOG).log(2)
