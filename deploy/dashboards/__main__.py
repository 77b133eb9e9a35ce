"""Writes the dashboard where Kustomize and the laptop's Grafana read it."""

from deploy.dashboards.dashboard import TARGET, rendered

TARGET.write_text(rendered(), encoding="utf-8")
