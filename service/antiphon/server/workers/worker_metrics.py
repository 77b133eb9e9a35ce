"""Metrics of a supervisor: how many workers serve, and how often one was replaced."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from antiphon.observability.metrics.model_families import PREFIX


class WorkerMetrics:
    """Families of a supervisor."""

    def __init__(self, registry: CollectorRegistry, num_workers: int, num_serving: Callable[[], int]) -> None:
        self._restarts = Counter(f"{PREFIX}worker_restarts", "Workers started in place of others.", registry=registry)
        configured = Gauge(f"{PREFIX}workers_configured", "Workers that the server should have.", registry=registry)
        configured.set(num_workers)
        serving = Gauge(f"{PREFIX}workers_serving", "Workers that accept requests.", registry=registry)
        serving.set_function(num_serving)

    def restarted(self) -> None:
        """Count a worker that takes the place of another."""
        self._restarts.inc()
