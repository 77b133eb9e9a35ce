"""Reader of the committed dashboard: its panels, and its expressions as Prometheus receives them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from deploy.dashboards.queries import filled
from tests.deploy.tools import ROOT

FILE = ROOT / "deploy" / "components" / "monitoring" / "antiphon-dashboard.json"
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


@dataclass(frozen=True, slots=True)
class Expression:
    """Expression and its location."""

    place: str
    text: str


def committed() -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(FILE.read_text(encoding="utf-8")))


def panels() -> list[dict[str, Any]]:
    return [panel for panel in committed()["panels"] if panel["type"] != "row"]


def expressions() -> list[Expression]:
    """Return the expressions of panels, annotations and variables, with values for every variable."""
    found = [*_of_panels(), *_of_variables()]
    found += [Expression(f"annotation {one['name']}", one["expr"]) for one in committed()["annotations"]["list"]]
    return [Expression(one.place, _chosen(one.text)) for one in found]


def of_panel(title: str) -> dict[str, str]:
    """Return the expressions of a panel by their names in its table or legend."""
    (panel,) = (panel for panel in panels() if panel["title"].startswith(title))
    names = {
        ref: name
        for step in panel.get("transformations", ())
        for ref, name in step["options"].get("renameByName", {}).items()
    }
    return {
        names.get(f"Value #{target['refId']}", target["legendFormat"]): _chosen(target["expr"])
        for target in panel["targets"]
    }


def _of_panels() -> Iterator[Expression]:
    for panel in panels():
        for target in panel["targets"]:
            yield Expression(f"{panel['title']}: {target['legendFormat'] or target['refId']}", target["expr"])


def _of_variables() -> Iterator[Expression]:
    for variable in committed()["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, variable
            yield Expression(f"variable {variable['name']}", f"group by ({match['label']}) ({match['selector']})")


def _chosen(text: str) -> str:
    found = filled(text, step="30s", span="5m")  # as wide as a test is long
    assert "$" not in found, found
    return found
