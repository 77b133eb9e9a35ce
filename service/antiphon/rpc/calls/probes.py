"""Readiness and liveness of the server and its models, as the health service reports them.

Readiness: "" and each service name are for the server, `<service>/<model>` is for one model. Liveness has a separate
name, so that a server that drains, or is still loading, is not killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpc_health.v1 import health, health_pb2

from antiphon.observability.telemetry import Context

LIVENESS = "liveness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthServicer(health.aio.HealthServicer):
    """Health service with List, which grpcio-health-checking declares and does not implement (grpc/grpc#41991)."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Store the status of a service, and send it to those who watch it."""
        self._listed[service] = status
        await super().set(service, status)

    async def List(self, request: Any, context: Context) -> Any:
        """Return the status of every service, for a HealthListRequest."""
        messages: Any = health_pb2  # its type stubs lack List
        checks = {name: messages.HealthCheckResponse(status=status) for name, status in self._listed.items()}
        return messages.HealthListResponse(statuses=checks)


class Health:
    """Reads a health servicer, for services that report health in their own messages."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self._servicer = servicer

    async def is_ready(self, context: Context) -> bool:
        """Return whether the server accepts requests. Call it within an RPC."""
        return await self._is_serving("", context)

    async def is_live(self, context: Context) -> bool:
        """Return whether the process is alive. Call it within an RPC."""
        return await self._is_serving(LIVENESS, context)

    async def _is_serving(self, name: str, context: Context) -> bool:
        found = await self._servicer.Check(health_pb2.HealthCheckRequest(service=name), context)
        return found.status == _SERVING


class Probes:
    """Health of a server and its models, stored in a health servicer. For the event loop.

    services: names of the server's readiness, in addition to ""; the first is also the prefix of the models' names.
    """

    def __init__(self, servicer: health.aio.HealthServicer, services: Iterable[str]) -> None:
        self._servicer = servicer
        self._services = tuple(services)
        self._models: dict[str, int] = {}
        self._is_ready = False
        self._is_leaving = False
        self._is_live = True

    async def start(self) -> None:
        """Report the state before any model is loaded: alive and not ready."""
        await self._update()

    async def announce(self, model: str, status: int) -> None:
        """Report the health of a model."""
        self._models[model] = status
        await self._update()

    @property
    def is_live(self) -> bool:
        """True while the process is alive."""
        return self._is_live

    async def ready(self, *, is_ready: bool = True) -> None:
        """Report whether every configured model is loaded, and can be served."""
        self._is_ready = is_ready
        await self._update()

    async def leave(self) -> None:
        """Report, permanently, that the server accepts no more requests."""
        self._is_leaving = True
        await self._update()

    async def live(self, *, is_live: bool) -> None:
        """Report whether the process is alive. A process that is not alive is not ready either."""
        self._is_live = is_live
        await self._update()

    async def _update(self) -> None:
        is_ready = self._is_ready and self._is_live and not self._is_leaving
        for service in ("", *self._services):
            await self._servicer.set(service, _SERVING if is_ready else _NOT_SERVING)
        for model, status in self._models.items():
            await self._servicer.set(f"{self._services[0]}/{model}", _NOT_SERVING if self._is_leaving else status)
        await self._servicer.set(LIVENESS, _SERVING if self._is_live else _NOT_SERVING)
