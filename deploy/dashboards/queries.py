"""PromQL expressions over the replicas and models that the dashboard's variables select.

Uses raw metrics only: with recording rules, the dashboard would be empty where the rules are not loaded.
"""

from __future__ import annotations

PROCESS = 'job=~"$job", instance=~"$instance"'
MODEL = f'{PROCESS}, model_name=~"$model"'
# Interval of Grafana: at least four scrapes, so that a rate has points at any zoom.
STEP = "$__rate_interval"
REPLICA = "instance, pod"  # no pod on a laptop
REPLICA_LEGEND = "{{instance}} {{pod}}"


def of_model(name: str, labels: str = "") -> str:
    """Select a metric of the chosen models."""
    return _select(f"antiphon_{name}", MODEL, labels)


def of_process(name: str, labels: str = "") -> str:
    """Select a metric of the chosen replicas, by its full name."""
    return _select(name, PROCESS, labels)


def rate(selected: str, step: str = STEP) -> str:
    """Return the increase per second of a counter."""
    return f"rate({selected}[{step}])"


def total(expression: str, by: str = "") -> str:
    """Return the sum over all replicas, by the given labels."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def rising(expression: str) -> str:
    """Return only values above zero, because lines at zero hide other lines."""
    return f"({expression} > 0)"


def quantile(share: float, histogram: str, by: str = "le") -> str:
    """Return a quantile of a histogram of the chosen models, over all replicas."""
    return f"histogram_quantile({share:g}, {total(rate(of_model(f'{histogram}_bucket')), by)})"


def mean(histogram: str) -> str:
    """Return the mean of a histogram of the chosen models; no value without observations."""
    count = total(rate(of_model(f"{histogram}_count")))
    return f"{total(rate(of_model(f'{histogram}_sum')))} / {rising(count)}"


def _select(name: str, base: str, labels: str) -> str:
    return f"{name}{{{base}, {labels}}}" if labels else f"{name}{{{base}}}"


def filled(expression: str, *, step: str, span: str) -> str:
    """Replace the variables of an expression, as Grafana does: all replicas and models, rates over step, range span."""
    chosen = {"job": "antiphon", "instance": ".*", "model": ".*", "__rate_interval": step, "__range": span}
    for name, value in chosen.items():
        expression = expression.replace(f"${name}", value)
    return expression
