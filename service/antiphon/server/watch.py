"""Periodic checks of a running server: engines that hang, delays of the event loop, connections and free memory.

An engine that hangs is reported and not ended: Python cannot end a thread, and the blocks of a step that never ended
cannot be trusted. The liveness probe fails while an engine hangs, so that an orchestrator ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.background import running_in_background
from antiphon.rpc.standard_services import Probes
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.server.machine import RESERVED_FILES, ResidentMemory, num_open_files

log = logging.getLogger(__name__)

# One check per second, but at least this many in each timeout.
_CHECKS_PER_TIMEOUT = 4
_MAX_CHECK_INTERVAL_S = 1.0
_LAG_INTERVAL_S = 0.5
_CONNECTION_INTERVAL_S = 1.0
# Interval of the warning while the limit is reached.
_WARN_INTERVAL_S = 60.0
# Time between trims: the minimum while a trim frees memory, doubled up to the maximum while it does not. Calls may hold
# memory long after it stopped growing. A trim takes up to 40 ms in a separate thread.
_MIN_TRIM_INTERVAL_S = 2.0
_MAX_TRIM_INTERVAL_S = 64.0
# Growth that triggers a trim at once, and the freed bytes after which the next trim follows soon.
_MIN_GROWTH_BYTES = 8 << 20
_MIN_GAIN_BYTES = 1 << 20
# Checks between two of the caches: a model that had no request for 10 to 20 s is idle.
_CHECKS_PER_CACHE_CHECK = 5

_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


@contextlib.asynccontextmanager
async def watching(
    models: Models, probes: Probes, families: MetricFamilies, *, timeout_s: float, max_connections: int | None
) -> AsyncIterator[None]:
    """Run all checks until the context exits. timeout_s: of an engine's step. max_connections: None is no limit."""
    lag = LoopLag(time.monotonic)
    watchdog = Watchdog(models, probes, timeout_s)
    connections = ConnectionWatch(max_connections, num_open_files)
    families.watch_loop(lambda: lag.lag_s)
    trimmer = MemoryTrimmer(ResidentMemory().num_bytes, engines=lambda: [served.engine for served in models])
    families.watch_connections(lambda: connections.is_full)
    async with running_in_background(watchdog.run(), lag.run(), connections.run(), trimmer.run()):
        yield


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
            await self.check()
            await asyncio.sleep(min(_MAX_CHECK_INTERVAL_S, self._timeout_s / _CHECKS_PER_TIMEOUT))

    async def check(self) -> None:
        """Compare every engine with the timeout. Update the probes and the metrics, and log every change."""
        models = {served.name: served for served in self._models}
        hung = frozenset(name for name, served in models.items() if served.engine.busy_s > self._timeout_s)
        for name, served in models.items():
            served.metrics.hangs(is_hung=name in hung)
        for name in hung - self._hung:
            engine = models[name].engine
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


class ConnectionWatch:
    """Compares the number of connections to the gRPC port with its limit. For the event loop.

    gRPC closes connections beyond the limit without a log line, and does not report their number. It is estimated as
    the number of open files minus the process's own files. max_connections: the limit; None is no limit.
    """

    def __init__(
        self,
        max_connections: int | None,
        count_files: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_connections = max_connections
        self._count_files = count_files
        self._clock = clock
        self._num_own = min(self._count_files(), RESERVED_FILES)  # the rest are connections that exist already
        self._warned_s: float | None = None
        self.is_full = False
        """True when new connections were closed at the last check."""

    async def run(self) -> None:
        """Check once a second until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(_CONNECTION_INTERVAL_S)

    def check(self) -> None:
        """Check once. Warn if the limit is reached, at most once per minute."""
        if self._max_connections is None:
            return
        num_connections = self._count_files() - self._num_own
        self.is_full = num_connections >= self._max_connections
        now_s = self._clock()
        if self.is_full and (self._warned_s is None or now_s - self._warned_s >= _WARN_INTERVAL_S):
            self._warned_s = now_s
            log.warning(
                "%d connections are open, as many as max_connections and the limit of open files allow; "
                "further ones are closed: raise the limit (ulimit -n), or end idle ones (max_connection_idle_s)",
                self._max_connections,
            )


class CacheOwner(Protocol):
    """Engine of a model."""

    def free_idle_cache(self) -> None:
        """Return the cache's memory to the system if no request came since the last call."""


class MemoryTrimmer:
    """Trims the heap after it has grown, and again until nothing is freed. resident_bytes: memory of this process.

    glibc keeps freed memory in one arena per thread, and gRPC's threads have separate arenas: 160,000 calls that were
    reset at once left 80 MB of unused memory. There is nothing to trim on systems without glibc. The caches of idle
    models are freed too: with all rows in use the shipped model's takes 64 MB.
    """

    def __init__(
        self,
        resident_bytes: Callable[[], int],
        trim: Callable[[int], object] | None = _trim,
        engines: Callable[[], Iterable[CacheOwner]] = tuple,
    ) -> None:
        """trim: malloc_trim of glibc; None if there is none. engines: returns those whose caches may be freed."""
        self._resident_bytes = resident_bytes
        self._engines = engines
        self._num_checks = 0
        self._trim = trim
        self._last_bytes = 0
        self._interval_s = _MIN_TRIM_INTERVAL_S
        self._num_skipped = 0
        self._thread = ThreadPoolExecutor(1, "free-memory")

    async def run(self) -> None:
        """Check now, which frees memory that loading has left, and then periodically until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_MIN_TRIM_INTERVAL_S)

    async def check(self) -> None:
        """Trim if memory has grown or the interval has passed. Called every _MIN_TRIM_INTERVAL_S."""
        self._num_checks += 1
        if self._num_checks % _CHECKS_PER_CACHE_CHECK == 0:
            for engine in self._engines():
                await asyncio.get_running_loop().run_in_executor(self._thread, engine.free_idle_cache)
        self._num_skipped += 1
        before = self._resident_bytes()
        has_grown = before >= self._last_bytes + _MIN_GROWTH_BYTES
        if self._trim is None or not (has_grown or self._num_skipped * _MIN_TRIM_INTERVAL_S >= self._interval_s):
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._trim, 0)
        self._num_skipped, self._last_bytes = 0, self._resident_bytes()
        is_worth_it = has_grown or before - self._last_bytes >= _MIN_GAIN_BYTES
        self._interval_s = _MIN_TRIM_INTERVAL_S if is_worth_it else min(2 * self._interval_s, _MAX_TRIM_INTERVAL_S)
