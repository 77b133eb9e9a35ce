"""Starts workers, replaces those that die or hang, and stops them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CollectorRegistry

from antiphon.domain.errors import AntiphonError
from antiphon.observability.metrics import WorkerMetrics
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.division import Division
from antiphon.server.workers.link import LinkLost
from antiphon.server.workers.role import Role
from antiphon.server.workers.worker_process import LoadedModel, WorkerProcess

log = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 1.0
# Waits before a worker is started again: one that dies at once must not occupy the machine.
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
# A worker that has served for this time has not died at once.
_STABLE_S = 60.0
# Beyond the time that a worker takes to drain.
_END_GRACE_S = 15.0


Serve = Callable[[], Awaitable[None]]
CatchUp = Callable[[WorkerProcess, Serve], Awaitable[None]]
"""Brings a new worker to the state of the others, and then makes it serve."""


class WorkerFailed(Exception):
    """A worker could not start, and has said why. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a worker ended with {code} before it could serve")
        self.code = code


class Supervisor:
    """All workers of a server. For the event loop.

    config: of each worker, with the port that they share. on_change: called when the number of serving workers
    changes. on_ended: called with the last metrics of a worker that has ended.
    """

    def __init__(
        self,
        config: ServerConfig,
        divisions: Sequence[Division],
        registry: CollectorRegistry,
        *,
        on_change: Callable[[], Awaitable[None]],
        on_ended: Callable[[str], None],
    ) -> None:
        self._config = config
        self._divisions = divisions
        self._on_change = on_change
        self._on_ended = on_ended
        self._serving: dict[int, WorkerProcess] = {}
        self._all: set[WorkerProcess] = set()
        self._stopping = asyncio.Event()
        self._metrics = WorkerMetrics(registry, len(divisions), lambda: len(self._serving))

    @property
    def serving(self) -> list[WorkerProcess]:
        """Workers that accept requests, by index."""
        return [self._serving[index] for index in sorted(self._serving)]

    async def start(self) -> list[LoadedModel]:
        """Start all workers and let them serve together. Return their models. Raises WorkerFailed.

        The first one starts alone: what is wrong with a bundle is said once, and what it measures is not disturbed.
        """
        first = await self._start(0, opens_early=True)
        models = await self._loaded(first)
        rest = await asyncio.gather(*(self._start(index, opens_early=True) for index in range(1, len(self._divisions))))
        await asyncio.gather(*(self._loaded(worker) for worker in rest))
        for worker in (first, *rest):
            await self._serve(worker)
        return models

    async def keep(self, catch_up: CatchUp) -> None:
        """Replace every worker that ends or hangs, until cancelled."""
        await asyncio.gather(*(self._keep(index, catch_up) for index in range(len(self._divisions))))

    async def stop(self) -> int:
        """Let all workers finish their requests and end. Return the largest of their exit codes."""
        self._stopping.set()
        workers = list(self._all)
        for worker in workers:
            worker.stop()
        ending = asyncio.gather(*(worker.ended() for worker in workers))
        limit_s = self._config.drain_delay_s + self._config.drain_grace_s + _END_GRACE_S
        try:
            codes = await asyncio.wait_for(asyncio.shield(ending), limit_s)
        except TimeoutError:
            for worker in workers:
                log.error("worker %d does not end; it is killed", worker.role.index)
                worker.kill()
            codes = await ending
        return max((code if code >= 0 else 1 for code in codes), default=0)

    async def _keep(self, index: int, catch_up: CatchUp) -> None:
        worker: WorkerProcess | None = self._serving[index]
        num_failures, began_s = 0, self._now_s()
        while not self._stopping.is_set():
            if worker is not None:
                await self._until_ended(worker)
                if self._stopping.is_set():
                    return
                num_failures = 0 if self._now_s() - began_s > _STABLE_S else num_failures
            await asyncio.sleep(_BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
            num_failures, began_s = num_failures + 1, self._now_s()
            worker = await self._replace(index, catch_up)

    async def _replace(self, index: int, catch_up: CatchUp) -> WorkerProcess | None:
        """Start a worker in the place of another. Return None if it cannot serve."""
        self._metrics.restarted()
        try:
            worker = await self._start(index, opens_early=False)
        except OSError as error:  # no memory, no process, no descriptor
            log.error("worker %d cannot be started: %s", index, error)
            return None
        try:
            await self._loaded(worker)
            await catch_up(worker, lambda: self._serve(worker))
        except (WorkerFailed, LinkLost, AntiphonError) as error:
            log.error("worker %d cannot take its place: %s", index, error)
            worker.kill()
            await self._forget(worker)
            return None
        log.info("worker %d serves again, as process %d", index, worker.pid)
        return worker

    async def _until_ended(self, worker: WorkerProcess) -> None:
        watching = asyncio.create_task(self._kill_if_hung(worker))
        try:
            code = await worker.ended()
        finally:
            watching.cancel()
        await self._forget(worker)
        if not self._stopping.is_set():
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.error("worker %d has ended with %s; another takes its place", worker.role.index, what)

    async def _forget(self, worker: WorkerProcess) -> None:
        await worker.ended()
        self._all.discard(worker)
        if self._serving.get(worker.role.index) is worker:
            del self._serving[worker.role.index]
            self._on_ended(worker.last_metrics)
            await self._on_change()

    async def _kill_if_hung(self, worker: WorkerProcess) -> None:
        """Kill a worker whose engine hangs, or whose event loop does not answer."""
        with contextlib.suppress(LinkLost):
            while True:
                if not await self._is_live(worker):
                    break
                await asyncio.sleep(_LIVENESS_INTERVAL_S)
            log.critical("worker %d hangs; it is killed", worker.role.index)
            worker.kill()

    async def _is_live(self, worker: WorkerProcess) -> bool:
        try:
            return await asyncio.wait_for(worker.is_live(), self._config.watchdog_timeout_s)
        except TimeoutError:
            return False

    async def _start(self, index: int, *, opens_early: bool) -> WorkerProcess:
        division = self._divisions[index]
        role = Role(index=index, num_workers=len(self._divisions), cores=division.cores, opens_early=opens_early)
        config = self._config.model_copy(update={"threads": division.threads})
        worker = await WorkerProcess.start(role, config)
        self._all.add(worker)
        if self._stopping.is_set():
            worker.stop()
        return worker

    async def _loaded(self, worker: WorkerProcess) -> list[LoadedModel]:
        try:
            return await worker.loaded()
        except LinkLost:
            raise WorkerFailed(await worker.ended()) from None

    async def _serve(self, worker: WorkerProcess) -> None:
        try:
            await worker.serve()
        except LinkLost:
            raise WorkerFailed(await worker.ended()) from None
        self._serving[worker.role.index] = worker
        await self._on_change()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
