"""Detects engines whose step does not end, and delays of the event loop. Reports both, and ends neither.

The liveness probe fails while an engine hangs, so that an orchestrator ends the process. Threads cannot be ended
from within, and the blocks of a step that never ended cannot be trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from antiphon.rpc.standard_services import Probes
from antiphon.rpc.v1.models import LoadedModel

log = logging.getLogger(__name__)

# One check per second, but at least this many in each timeout.
_LOOKS_PER_TIMEOUT = 4
_MAX_INTERVAL_S = 1.0
_LAG_INTERVAL_S = 0.5


class Watchdog:
    """Watches the engines of models. For the event loop; busy_s of an engine may be read from any thread.

    timeout_s: longest time of a step, and longest time that work waits for a step to begin.
    """

    def __init__(self, models: Iterable[LoadedModel], probes: Probes, timeout_s: float) -> None:
        self._models = models
        self._probes = probes
        self._timeout_s = timeout_s
        self._hung: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(min(_MAX_INTERVAL_S, self._timeout_s / _LOOKS_PER_TIMEOUT))

    async def look(self) -> None:
        """Compare every engine with the timeout. Update the probes and the metrics, and log every change."""
        served = {one.name: one for one in self._models}
        hung = frozenset(name for name, one in served.items() if one.engine.busy_s > self._timeout_s)
        for name, one in served.items():
            one.metrics.hangs(is_hung=name in hung)
        for name in hung - self._hung:
            engine = served[name].engine
            log.critical(
                "model %s: its engine has not ended a step for %.1f s; stack of its thread:\n%s",
                name,
                engine.busy_s,
                engine.stack(),
            )
        for name in self._hung - hung:
            log.warning("model %s: its engine has ended the step and continues", name)
        if bool(hung) != bool(self._hung):
            await self._probes.live(is_live=not hung)
        self._hung = hung


class LoopLag:
    """Delay of the event loop, measured by a timer every half second. The lag may be read from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s = clock() + _LAG_INTERVAL_S
        self._last_s = 0.0

    async def run(self) -> None:
        """Measure periodically until cancelled."""
        while True:
            self._due_s = self._clock() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._last_s = max(0.0, self._clock() - self._due_s)

    @property
    def lag_s(self) -> float:
        """Seconds of the last delay or of the current one, whichever is longer."""
        return max(self._last_s, self._clock() - self._due_s)
