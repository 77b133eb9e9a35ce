"""The admin service of a server of several processes: every change reaches all workers, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from antiphon.domain.errors import AntiphonError, Unavailable
from antiphon.server.workers.division import Role
from antiphon.server.workers.link import LinkLost
from antiphon.server.workers.supervisor import WorkerProcess
from antiphon.v1 import admin_pb2 as pb

log = logging.getLogger(__name__)


class WorkersAdmin:
    """Methods of the service. They raise AntiphonError.

    serving: returns the workers that serve. on_loaded, on_unloaded: called with the name of a model after a change.
    """

    def __init__(
        self,
        serving: Callable[[], Sequence[WorkerProcess]],
        on_loaded: Callable[[str], Awaitable[None]],
        on_unloaded: Callable[[str], Awaitable[None]],
    ) -> None:
        self._serving = serving
        self._on_loaded = on_loaded
        self._on_unloaded = on_unloaded
        self._changes: list[tuple[str, str, bytes]] = []  # method, model, message
        self.changing = asyncio.Lock()
        """Held during a change, and while a new worker catches up with the others."""

    async def load_model(self, message: pb.LoadModelRequest, context: object = None) -> pb.LoadModelResponse:
        """Load a bundle in every worker. If one cannot, unload it from the others."""
        async with self.changing:
            request = message.SerializeToString()
            first, *rest = self._workers()
            answer = await _call(first, "load_model", request)
            results = await asyncio.gather(
                *(_call(worker, "load_model", request) for worker in rest), return_exceptions=True
            )
            failures = [result for result in results if isinstance(result, AntiphonError)]
            if failures:
                pairs = zip(rest, results, strict=True)
                have = [first, *(worker for worker, result in pairs if isinstance(result, bytes))]
                await self._undo(have, message.name)
                raise failures[0]
            self._changes.append(("load_model", message.name, request))
            await self._on_loaded(message.name)
            return pb.LoadModelResponse.FromString(answer)

    async def unload_model(self, message: pb.UnloadModelRequest, context: object = None) -> pb.UnloadModelResponse:
        """Unload a model from every worker."""
        async with self.changing:
            request = message.SerializeToString()
            answers = await asyncio.gather(*(_call(worker, "unload_model", request) for worker in self._workers()))
            kept = [change for change in self._changes if change[1] != message.name]
            was_configured = len(kept) == len(self._changes)
            self._changes = [*kept, ("unload_model", message.name, request)] if was_configured else kept
            await self._on_unloaded(message.name)
            has_drained = all(pb.UnloadModelResponse.FromString(answer).has_drained for answer in answers)
            return pb.UnloadModelResponse(has_drained=has_drained)

    async def get_memory(self, message: pb.GetMemoryRequest, context: object = None) -> pb.GetMemoryResponse:
        """Return the bytes of each model in the memory budget, all workers together."""
        return pb.GetMemoryResponse.FromString(await _call(self._workers()[0], "get_memory", b""))

    async def get_cache(self, message: pb.GetCacheRequest, context: object = None) -> pb.GetCacheResponse:
        """Return the cache blocks of each model in every worker."""
        request = message.SerializeToString()
        workers = [worker for worker in self._workers() if worker.spec.role is not Role.FRONT]
        answers = await asyncio.gather(*(_call(worker, "get_cache", request) for worker in workers))
        caches = []
        for worker, answer in zip(workers, answers, strict=True):
            for cache in pb.GetCacheResponse.FromString(answer).caches:
                cache.worker = worker.spec.index
                caches.append(cache)
        return pb.GetCacheResponse(caches=sorted(caches, key=lambda cache: (cache.model, cache.worker)))

    async def catch_up(self, worker: WorkerProcess) -> None:
        """Make the changes so far in a new worker. Hold `changing`. Raises AntiphonError or LinkLost."""
        for method in ("load_model", "unload_model"):  # loads first: the last model cannot be unloaded
            for change, _, request in self._changes:
                if change == method:
                    await worker.administer(method, request)

    def _workers(self) -> Sequence[WorkerProcess]:
        workers = self._serving()
        if not workers:
            raise Unavailable("no worker is serving")
        return workers

    async def _undo(self, workers: Sequence[WorkerProcess], name: str) -> None:
        request = pb.UnloadModelRequest(name=name).SerializeToString()
        results = await asyncio.gather(
            *(_call(worker, "unload_model", request) for worker in workers), return_exceptions=True
        )
        if any(isinstance(result, AntiphonError) for result in results):
            log.error("model %s could not be unloaded from every worker: %s", name, results)


async def _call(worker: WorkerProcess, method: str, request: bytes) -> bytes:
    """Call one worker. One that dies meanwhile raises Unavailable: its successor catches up."""
    try:
        return await worker.administer(method, request)
    except LinkLost:
        raise Unavailable(f"worker {worker.spec.index} has ended; try again") from None
