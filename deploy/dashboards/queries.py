"""Expressions in PromQL, over what the dashboard's variables select.

Raw metrics only: recording rules of other names would leave the dashboard empty where nobody loaded them.
"""

from __future__ import annotations

PROCESS = 'job=~"$job", instance=~"$instance"'
MODEL = f'{PROCESS}, model_name=~"$model"'
# Grafana's: four scrapes at least, so that a rate has points whatever the zoom.
STEP = "$__rate_interval"
REPLICA = "instance, pod"  # no pod on a laptop
REPLICA_LEGEND = "{{instance}} {{pod}}"


def of_model(name: str, labels: str = "") -> str:
    """A metric of the chosen models."""
    return _select(f"antiphon_{name}", MODEL, labels)


def of_process(name: str, labels: str = "") -> str:
    """A metric of the chosen replicas, with its full name."""
    return _select(name, PROCESS, labels)


def rate(selected: str, step: str = STEP) -> str:
    """Its growth a second."""
    return f"rate({selected}[{step}])"


def total(expression: str, by: str = "") -> str:
    """Its sum over all replicas, by labels where given."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def rising(expression: str) -> str:
    """Only what is above zero: lines of nothing hide the others."""
    return f"({expression} > 0)"


def quantile(share: float, histogram: str, by: str = "le") -> str:
    """A quantile of a histogram of the chosen models, over all replicas."""
    return f"histogram_quantile({share:g}, {total(rate(of_model(f'{histogram}_bucket')), by)})"


def mean(histogram: str) -> str:
    """The mean of a histogram of the chosen models; nothing while nothing is observed."""
    count = total(rate(of_model(f"{histogram}_count")))
    return f"{total(rate(of_model(f'{histogram}_sum')))} / {rising(count)}"


def _select(name: str, base: str, labels: str) -> str:
    return f"{name}{{{base}, {labels}}}" if labels else f"{name}{{{base}}}"


def filled(expression: str, *, step: str, span: str) -> str:
    """An expression as Grafana would send it: all replicas and models, rates over step, the whole over span."""
    chosen = {"job": "antiphon", "instance": ".*", "model": ".*", "__rate_interval": step, "__range": span}
    for name, value in chosen.items():
        expression = expression.replace(f"${name}", value)
    return expression
