"""Loads and ends models of a running server, one change at a time.

A change once begun is finished, even if whoever asked for it hangs up: a client cannot leave half of one behind. Owns
the order of things; what loading means is `loading.py`'s business, which model a request gets that of `models.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from grpc_health.v1.health_pb2 import HealthCheckResponse

from antiphon.service.errors import BadBundle, Unavailable
from antiphon.service.loading import Shared, StartupError, load
from antiphon.service.model_settings import ModelPlan
from antiphon.service.models import Models, Served

log = logging.getLogger(__name__)

_A = TypeVar("_A")
Announce = Callable[[str, int], Awaitable[None]]


class Control:
    """Changes the models served. For the event loop.

    announce: told the health of each model.
    """

    def __init__(self, models: Models, shared: Shared, announce: Announce) -> None:
        self.models = models
        self._shared = shared
        self._announce = announce
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._leaving: list[Served] = []
        self._is_stopping = False

    @property
    def has_lost_engine(self) -> bool:
        """Whether the thread of some model's engine has ended by itself, so that its requests cannot be answered.

        The server leaves then, all its models with it: a process that is watched comes back whole, while one that went
        on with the rest would look healthy and refuse a model for good.
        """
        return not all(served.engine.is_alive for served in self.models)

    async def publish(self, served: Served) -> None:
        """Serve a model that was loaded. Raises ModelExists."""
        self.models.add(served)
        served.engine.start()
        await self._announce(served.name, HealthCheckResponse.SERVING)

    async def load(self, plan: ModelPlan) -> Served:
        """Load a bundle and serve it under the plan's name; returns when it answers.

        Raises ModelExists, BadBundle, OverBudget or, once draining, Unavailable; nothing has changed then.
        """
        return await self._finish(self._load(plan))

    async def unload(self, name: str, grace_s: float) -> bool:
        """Serve a model no longer, let it finish what it runs for at most grace_s, then free what it holds.

        Returns whether all of it finished by itself. Raises ModelNotFound or LastModel.
        """
        return await self._finish(self._unload(name, grace_s))

    async def drain(self, grace_s: float) -> bool:
        """Finish what every model runs, all within one grace; returns whether all did."""
        self._is_stopping = True
        engines = [served.engine for served in (*self.models, *self._leaving)]
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(len(engines)) as threads:
            drained = [loop.run_in_executor(threads, engine.drain, grace_s) for engine in engines]
            return all(await asyncio.gather(*drained))

    async def _finish(self, change: Coroutine[Any, Any, _A]) -> _A:
        task = asyncio.ensure_future(change)
        self._changes.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _load(self, plan: ModelPlan) -> Served:
        async with self._changing:
            self._check_running()
            if plan.name is not None:
                self.models.check_free(plan.name)
            try:
                served = await asyncio.to_thread(load, plan, self._shared)
            except StartupError as error:
                raise BadBundle(str(error)) from None
            if self._is_stopping:
                self._forget(served)
            self._check_running()
            await self.publish(served)
            log.info("serving model %s from %s", served.name, plan.path)
            return served

    async def _unload(self, name: str, grace_s: float) -> bool:
        async with self._changing:
            served = self.models.remove(name)
            self._leaving.append(served)
            await self._announce(name, HealthCheckResponse.NOT_SERVING)
            has_drained = await asyncio.to_thread(served.engine.drain, grace_s)
            self._leaving.remove(served)
            self._forget(served)
            log.info("model %s is gone", name)
            return has_drained

    def _check_running(self) -> None:
        if self._is_stopping:
            raise Unavailable("the server is shutting down")

    def _forget(self, served: Served) -> None:
        """Free what a model holds; calls that still write its last answers hold the little they need."""
        served.engine.release()
        served.metrics.remove()
        self._shared.budget.give_back(served.name)
