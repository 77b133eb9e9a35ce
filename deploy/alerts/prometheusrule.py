"""Writes rules/*.yaml, which Prometheus and promtool read directly, as a PrometheusRule for Prometheus Operator.

    python deploy/alerts/prometheusrule.py > deploy/components/monitoring/prometheusrule.yaml

Works on lines, so that comments stay; needs nothing but Python. A test holds the two together.
"""

from __future__ import annotations

import sys
from pathlib import Path

RULES = Path(__file__).parent / "rules"
HEAD = """\
# Made by deploy/alerts/prometheusrule.py from deploy/alerts/rules: change those, and make this again.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: antiphon
  labels:
    app.kubernetes.io/name: antiphon
    app.kubernetes.io/component: server
    app.kubernetes.io/part-of: antiphon
spec:
  groups:
"""


def prometheus_rule() -> str:
    """Return the object as YAML: the groups of every file, in order of the files' names, the recordings last."""
    return HEAD + "".join(_groups(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yaml")))


def _groups(text: str) -> str:
    """Return a rules file's content below `groups:` and the comment above it, indented by two more spaces."""
    above, _, below = text.partition("groups:\n")
    comment = "".join(f"    {line}\n" for line in above.splitlines())
    return comment + "".join(f"  {line}".rstrip() + "\n" for line in below.splitlines())


if __name__ == "__main__":
    sys.stdout.write(prometheus_rule())
