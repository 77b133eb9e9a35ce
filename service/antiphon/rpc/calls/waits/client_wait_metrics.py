"""Metrics of calls that wait for their clients."""

from __future__ import annotations

from functools import partial

from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.calls.waits.client_waits import ClientWaits, Stage


class WaitMetrics:
    """The metrics of calls that wait for their clients. For the event loop."""

    def __init__(self, families: MetricFamilies) -> None:
        self._given_up = {
            (stage, cause): families.calls_given_up.labels(stage.value, cause)
            for stage in Stage
            for cause in ("timeout", "pressure")
        }
        self._families = families

    def given_up(self, stage: Stage, cause: str) -> None:
        """Count a call that was ended because its client kept it waiting."""
        self._given_up[stage, cause].inc()

    def watch(self, waits: ClientWaits) -> None:
        """Report the number of waiting calls and unsent bytes at every scrape."""
        self._families.unsent_bytes.set_function(lambda: waits.unsent_bytes)
        for stage in Stage:
            self._families.calls_waiting.labels(stage.value).set_function(partial(waits.num_waiting, stage))
