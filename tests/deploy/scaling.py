"""Rules in scaled time: the same expressions with all durations divided by one number.

An alert over a range of 5 minutes that waits for 5 more cannot fire in a test of seconds. So the tests run the shipped
file with one change: each `for`, each range in square brackets and each interval is divided by `scale`. Thresholds,
metrics and labels stay, and names of recordings keep their `5m`. promtool's tests of the unchanged rules check the
durations themselves (tests/deploy/rules).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import ROOT

ALERTS = ROOT / "deploy" / "alerts"
RULES = ALERTS / "rules"
_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RANGE = re.compile(r"\[(\w+)\]")
_DURATIONS = {"for", "interval", "group_wait", "group_interval", "repeat_interval"}


def scaled(duration: str, scale: float) -> str:
    """Divide a duration such as 5m; at least a millisecond."""
    number, unit = re.fullmatch(r"(\d+)(ms|[smhd])", duration).groups()  # type: ignore[union-attr]
    return f"{max(1, round(int(number) * _UNITS_MS[unit] / scale))}ms"


def scaled_rules(scale: float) -> dict[str, Any]:
    """Return every group of deploy/alerts/rules in one document, in 1 / scale of the time."""
    groups = [group for path in sorted(RULES.glob("*.yaml")) for group in read_yaml(path)["groups"]]

    def shorten(key: str, value: str) -> str:
        if key == "expr":
            return _RANGE.sub(lambda match: f"[{scaled(match[1], scale)}]", value)
        return scaled(value, scale) if key in _DURATIONS else value

    return {"groups": _mapped(groups, shorten)}


def alerts() -> list[dict[str, Any]]:
    """Return every alert of the rules, with unchanged durations."""
    groups = [group for path in sorted(RULES.glob("*.yaml")) for group in read_yaml(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def alert_names() -> set[str]:
    return {rule["alert"] for rule in alerts()}


def scaled_alertmanager(scale: float, webhook: str) -> dict[str, Any]:
    """Return deploy/alerts/alertmanager.yaml in 1 / scale of the time, with a receiver."""
    config = _mapped(
        read_yaml(ALERTS / "alertmanager.yaml"), lambda key, value: scaled(value, scale) if key in _DURATIONS else value
    )
    config["receivers"][0]["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    return dict(config)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _mapped(node: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return a document in which every text is changed by a function of its key."""
    if isinstance(node, dict):
        return {name: _mapped(value, change, name) for name, value in node.items()}
    if isinstance(node, list):
        return [_mapped(value, change, key) for value in node]
    return change(key, node) if isinstance(node, str) else node
