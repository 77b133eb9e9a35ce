"""What the health service says at each moment: who may send requests, and whether the process should go on living.

Readiness: "" and each service stand for the server, `<service>/<model>` for each model. Liveness has a name of its own,
so that a server that drains, or still loads, is not killed for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from grpc_health.v1 import health, health_pb2

from antiphon.service.observability.telemetry import Context

LIVENESS = "liveness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Asks a health servicer, for services that tell of health in words of their own."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self._servicer = servicer

    async def is_ready(self, context: Context) -> bool:
        """Whether requests should be sent here; within an RPC."""
        return await self._is_serving("", context)

    async def is_live(self, context: Context) -> bool:
        """Whether the process does its work; within an RPC."""
        return await self._is_serving(LIVENESS, context)

    async def _is_serving(self, name: str, context: Context) -> bool:
        found = await self._servicer.Check(health_pb2.HealthCheckRequest(service=name), context)
        return found.status == _SERVING


class Probes:
    """The health of a server and its models, kept in a health servicer. For the event loop.

    services: names, beside "", of the server's own readiness; the first is also that of its models.
    """

    def __init__(self, servicer: health.aio.HealthServicer, services: Iterable[str]) -> None:
        self._servicer = servicer
        self._services = tuple(services)
        self._models: dict[str, int] = {}
        self._is_ready = False
        self._is_leaving = False
        self._is_live = True

    async def start(self) -> None:
        """Say what is so before anything is loaded: alive, and not ready."""
        await self._tell()

    async def announce(self, model: str, status: int) -> None:
        """Say the health of a model."""
        self._models[model] = status
        await self._tell()

    async def ready(self) -> None:
        """Say that every model that was asked for answers."""
        self._is_ready = True
        await self._tell()

    async def leave(self) -> None:
        """Say, for good, that no request should be sent here any more."""
        self._is_leaving = True
        await self._tell()

    async def live(self, *, is_live: bool) -> None:
        """Say whether the process still does its work; where not, it is not ready either."""
        self._is_live = is_live
        await self._tell()

    async def _tell(self) -> None:
        is_ready = self._is_ready and self._is_live and not self._is_leaving
        for service in ("", *self._services):
            await self._servicer.set(service, _SERVING if is_ready else _NOT_SERVING)
        for model, status in self._models.items():
            await self._servicer.set(f"{self._services[0]}/{model}", _NOT_SERVING if self._is_leaving else status)
        await self._servicer.set(LIVENESS, _SERVING if self._is_live else _NOT_SERVING)
