"""Metrics of engines, calls and the process, as Prometheus families."""
