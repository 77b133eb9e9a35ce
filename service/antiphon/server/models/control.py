"""Loads and unloads models of a running server, one change at a time.

A change that has begun is completed even if its client disconnects, so that no change is left half done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from grpc_health.v1.health_pb2 import HealthCheckResponse

from antiphon.domain.errors import BadBundle, Unavailable
from antiphon.engine.remote import AnyEngine
from antiphon.rpc.background import ignore_result, in_background
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.server.models.loading import SharedResources, StartupError, load
from antiphon.server.settings import ModelPlan

log = logging.getLogger(__name__)

_A = TypeVar("_A")
Announce = Callable[[str, int], Awaitable[None]]


class Control:
    """Changes the models served. For the event loop.

    announce: called with the health of each model.
    """

    def __init__(self, models: Models, resources: SharedResources, announce: Announce) -> None:
        self.models = models
        self.on_change: Callable[[], None] | None = None
        """Called when the models served have changed."""
        self._resources = resources
        self._announce = announce
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._leaving: list[LoadedModel] = []
        self._stopping = asyncio.Event()

    @property
    def has_lost_engine(self) -> bool:
        """True when the thread of a model's engine has ended by itself, so that its requests cannot be answered.

        The server then stops with all its models: a supervisor restarts the process with all models. A process that
        continued with the other models would look healthy, and never serve this model again.
        """
        return not all(served.engine.is_alive for served in self.models)

    @property
    def has_hung_engine(self) -> bool:
        """True when the thread of a drained engine still runs: it is in a step that does not end."""
        return self._stopping.is_set() and any(engine.is_alive for engine in self._engines)

    async def publish(self, served: LoadedModel) -> None:
        """Serve a loaded model. Raises ModelExists."""
        self.models.add(served)
        served.engine.start()
        self._changed()
        await self._announce(served.name, HealthCheckResponse.SERVING)

    async def load(self, plan: ModelPlan) -> LoadedModel:
        """Load a bundle and serve it under the plan's name. Returns when the model is served.

        Raises ModelExists, BadBundle, OverBudget or, while draining, Unavailable; then nothing has changed.
        """
        return await self._finish(self._load(plan))

    async def unload(self, name: str, grace_s: float) -> bool:
        """Stop serving a model, let its requests finish for at most grace_s, then free its memory.

        Returns whether all requests finished by themselves. Raises ModelNotFound or LastModel.
        """
        return await self._finish(self._unload(name, grace_s))

    async def drain(self, grace_s: float) -> bool:
        """Let the requests of all models finish within grace_s. Return whether all did. Abandons a running load."""
        self._stopping.set()
        drained = [in_background(partial(engine.drain, grace_s), "drain") for engine in self._engines]
        return all(await asyncio.gather(*drained))

    @property
    def _engines(self) -> list[AnyEngine]:
        return [served.engine for served in (*self.models, *self._leaving)]

    async def _finish(self, change: Coroutine[Any, Any, _A]) -> _A:
        task = asyncio.ensure_future(change)
        self._changes.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _load(self, plan: ModelPlan) -> LoadedModel:
        async with self._changing:
            self._check_running()
            if plan.name is not None:
                self.models.check_free(plan.name)
            try:
                served = await self._unless_stopping(in_background(partial(load, plan, self._resources), "load"))
            except StartupError as error:
                raise BadBundle(str(error)) from None
            await self.publish(served)
            log.info("serving model %s from %s", served.name, plan.path)
            return served

    async def _unload(self, name: str, grace_s: float) -> bool:
        async with self._changing:
            served = self.models.remove(name)
            self._leaving.append(served)
            self._changed()
            await self._announce(name, HealthCheckResponse.NOT_SERVING)
            has_drained = await asyncio.to_thread(served.engine.drain, grace_s)
            self._leaving.remove(served)
            self._forget(served)
            log.info("model %s is unloaded", name)
            return has_drained

    async def _unless_stopping(self, loading: asyncio.Future[LoadedModel]) -> LoadedModel:
        """Return the loaded model. Raises Unavailable as soon as the server drains, without waiting for the load."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            ignore_result(loading)
        self._check_running()
        return loading.result()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise Unavailable("the server is shutting down")

    def _forget(self, served: LoadedModel) -> None:
        """Free a model's memory. Calls that still write its last answers keep the little that they need."""
        served.engine.release()
        served.metrics.remove()
        self._resources.budget.release(served.name)
