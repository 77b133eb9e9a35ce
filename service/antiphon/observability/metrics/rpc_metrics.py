"""Metrics of RPCs of all methods."""

from __future__ import annotations

from prometheus_client import Counter

from antiphon.domain.errors import Status, refusal_reasons
from antiphon.observability.metrics.metric_families import MetricFamilies


class RpcMetrics:
    """Metrics of RPCs, independent of the model that they name. For the event loop."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._handled: dict[tuple[str, str], Counter] = {}
        self._num_in_flight = 0
        families.rpcs_in_flight.set_function(lambda: self._num_in_flight)
        for reason in refusal_reasons():
            families.requests_refused.labels("", reason)

    def expect(self, method: str) -> None:
        """Show a method's counts at zero, for every possible status."""
        if (method, "OK") not in self._handled:
            for code in ("OK", *Status.__members__):
                self._handled[method, code] = self._families.rpcs_handled.labels(method, code)

    def begun(self) -> None:
        """Record that an RPC has begun."""
        self._num_in_flight += 1

    def handled(self, method: str, code: str) -> None:
        """Count a finished RPC. method: its full name, which must be one of the server's. code: name of its status."""
        child = self._handled.get((method, code))
        if child is None:
            child = self._handled[method, code] = self._families.rpcs_handled.labels(method, code)
        child.inc()

    def left(self) -> None:
        """Record that an RPC is no longer in flight."""
        self._num_in_flight -= 1

    def refused(self, reason: str) -> None:
        """Count an RPC that was refused before its model was known."""
        self._families.requests_refused.labels("", reason).inc()
