"""The whole dashboard. Its rows are in the order in which an operator on call reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard as built
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from deploy.dashboards import engine, glance, gpu, latency, memory, traffic
from deploy.dashboards.queries import of_process
from deploy.dashboards.shapes import SOURCE

# In the component's folder, because Kustomize reads no files outside of it.
TARGET = Path(__file__).parents[1] / "components" / "monitoring" / "antiphon-dashboard.json"
ROWS = {
    "At a glance": glance.panels,
    "Traffic": traffic.panels,
    "Latency": latency.panels,
    "Queue and engine": engine.panels,
    "Cache": memory.cache_panels,
    "Attention workspace: T or T²?": memory.workspace_panels,
    "Memory and machine": memory.process_panels,
    "NVIDIA GPUs": gpu.panels,
}


def rendered() -> str:
    """Return the dashboard as JSON that Grafana imports."""
    body = json.loads(json.dumps(_dashboard(), cls=JSONEncoder))
    body["annotations"] = {"list": [_starts()]}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _dashboard() -> dashboard.Dashboard:
    page = (
        built.Dashboard("Antiphon")
        .uid("antiphon")
        .description("Traffic, latency, queue, cache and memory of Antiphon servers. docs/PLAY.md documents it.")
        .tags(["antiphon", "inference"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .variables(_variables())
        .link(_link("Runbook", "RUNBOOK.md"))
        .link(_link("This dashboard", "PLAY.md"))
    )
    number = 0
    for title, panels in ROWS.items():
        page = page.with_row(built.Row(title).id(number := number + 1))
        for panel in panels():
            page = page.with_panel(panel.id(number := number + 1))
    return page.build()


def _variables() -> list[Builder[dashboard.VariableModel]]:
    model = 'label_values(antiphon_model_info{job=~"$job", instance=~"$instance"}, model_name)'
    docs = "Address of this repository's published docs/: links to the runbook begin with it."
    return [
        built.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _values("job", "Job", "label_values(antiphon_build_info, job)").current(_choice("antiphon")),
        _values("instance", "Replica", 'label_values(antiphon_build_info{job=~"$job"}, instance)'),
        _values("model", "Model", model),
        built.TextBoxVariable("docs").label("Docs").description(docs).default_value("docs"),
    ]


def _values(name: str, label: str, query: str) -> built.QueryVariable:
    """Return a variable that selects one, several or all current values of a label; by default all."""
    variable = built.QueryVariable(name).label(label).datasource(SOURCE).query({"query": query, "refId": name})
    variable = variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True)
    variable = variable.all_value(".*").sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    return variable.current(_choice("All", "$__all"))


def _choice(text: str, value: str | None = None) -> dashboard.VariableOption:
    return dashboard.VariableOption(selected=True, text=[text], value=[value or text])


def _link(title: str, page: str) -> built.DashboardLink:
    link = built.DashboardLink(title).type(dashboard.DashboardLinkType.LINK).icon("doc").target_blank(True)
    return link.url(f"${{docs}}/{page}")


def _starts() -> dict[str, Any]:
    """Return an annotation that marks the start of a replica. The SDK has no field for a value that is a time."""
    return {
        "name": "Starts",
        "datasource": SOURCE.to_json(),
        "enable": True,
        "iconColor": "blue",
        "expr": f"{of_process('process_start_time_seconds')} * 1000",
        "useValueForTime": True,
        "step": "60s",
        "titleFormat": "Started",
        "textFormat": "{{instance}} {{pod}}",
    }
