"""Server of a bundle in this process over real gRPC, with the bundle's graphs and tokenizer, and the engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from antiphon.client import AsyncClient
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.standard_services import HealthServicer
from antiphon.rpc.v1.handlers import Handlers
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.rpc.v1.streaming import Pacing
from antiphon.server.app import build_server
from antiphon.server.models.loading import SharedResources, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from tests.waits import client_waits


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedBundle:
    """Running server of one bundle, with a client, its address and the served model."""

    client: AsyncClient
    target: str
    served: LoadedModel
    registry: CollectorRegistry


@contextlib.asynccontextmanager
async def serving_bundle(
    path: Path, *, device: CudaDevice | None = None, **settings: Any
) -> AsyncIterator[ServedBundle]:
    """Serve a bundle on a free port. At the end, check that nothing runs and every block is free.

    device: GPU on which the bundle runs; None is the processor.
    """
    config = ServerConfig(bundle=path, threads=1, **settings)
    registry = CollectorRegistry()
    shared = SharedResources(
        families=MetricFamilies(registry),
        pacing=Pacing(1e6),
        budget=MemoryBudget(None),
        device=device,
    )
    served = load(config.plans[0], shared)
    models = Models()
    models.add(served)
    calls = Handlers(models, CallMiddleware(Telemetry(shared.families), client_waits()), shared.pacing)
    server = build_server(config, calls, HealthServicer())
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    served.engine.start()
    await server.start()
    try:
        async with AsyncClient(target) as client:
            yield ServedBundle(client=client, target=target, served=served, registry=registry)
            assert served.engine.num_running == 0
            assert served.engine.num_free_blocks == served.engine.num_blocks
    finally:
        served.engine.stop()
        await server.stop(None)
