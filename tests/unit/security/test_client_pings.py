"""Silent clients that ping as often as the server allows stay connected, on every gRPC port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from prometheus_client import CollectorRegistry

from antiphon.client import AsyncClient, Connection, Generation, connection
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.reloading import FileMetrics
from antiphon.rpc.standard_services import HealthServicer
from antiphon.server import admin, ports
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer
from antiphon.server.settings import ServerConfig
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.serving import SOURCE, asking, serving
from tests.waits import client_waits
from tests.wire import tapped

# gRPC disconnects a client after its third ping that comes too early.
NUM_PINGS = 6
PINGING = [
    ("grpc.keepalive_time_ms", 1000),
    # Otherwise a client of gRPC's own library pings once a minute after the second ping.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
]


@pytest.fixture(autouse=True)
def minimum_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow clients a ping a second, instead of every 10 s."""
    options = tuple((name, 1000 if name.endswith("_ms") else value) for name, value in ports.CLIENT_PING_OPTIONS)
    monkeypatch.setattr(ports, "CLIENT_PING_OPTIONS", options)


@contextlib.asynccontextmanager
async def main_port() -> AsyncIterator[str]:
    async with serving() as served:
        yield served.target


@contextlib.asynccontextmanager
async def probe_port() -> AsyncIterator[str]:
    servicer = HealthServicer()
    await servicer.set("", HealthCheckResponse.SERVING)
    async with ports.probe_port(ServerConfig(probe_port=0), servicer) as port:
        yield f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def admin_port() -> AsyncIterator[str]:
    config, families = ServerConfig(admin_port=0), MetricFamilies(CollectorRegistry())
    nothing: Any = None  # no call is made
    servicer, access = AdminServicer(nothing, nothing, config), Access(config, FileMetrics(families))
    async with admin.admin_port(config, access, servicer, Telemetry(families), client_waits()) as port:
        yield f"127.0.0.1:{port}"


async def watch(channel: Any) -> Any:
    stub: Any = HealthStub(channel)
    call = stub.Watch(HealthCheckRequest())
    assert (await call.read()).status == HealthCheckResponse.SERVING
    return call


async def paused_requests(channel: Any) -> Any:
    stub: Any = InferenceServiceStub(channel)
    call = stub.GenerateMany()
    await call.write(pb.GenerateManyRequest(requests=[pb.ManyRequest(id=1, request=asking())]))
    while not any(answer.delta.HasField("usage") for answer in (await call.read()).answers):
        pass
    return call


async def silent_reflection(channel: Any) -> Any:
    stub: Any = ServerReflectionStub(channel)
    return stub.ServerReflectionInfo()


async def test_silent_calls_survive_pings_at_the_allowed_rate() -> None:
    silent = [(main_port, watch), (main_port, paused_requests), (probe_port, watch), (admin_port, silent_reflection)]
    await asyncio.gather(*(ping_silent_call(port, begin) for port, begin in silent))


async def ping_silent_call(port: Callable[[], AbstractAsyncContextManager[str]], begin: Any) -> None:
    async with (
        asyncio.timeout(60),
        port() as server,
        tapped(server) as tap,
        grpc.aio.insecure_channel(tap.target, options=PINGING) as channel,
    ):
        call = await begin(channel)
        tap.received.clear()
        pings, answer = asyncio.ensure_future(tap.wait_for_pings(NUM_PINGS)), asyncio.ensure_future(call.read())
        await asyncio.wait((pings, answer), return_when=asyncio.FIRST_COMPLETED)
        assert not answer.done(), answer.exception()
        assert pings.done()
        call.cancel()
        await asyncio.wait((answer,))


async def test_client_pings_a_silent_server_and_keeps_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MIN_KEEPALIVE_S", 1)
    async with asyncio.timeout(60), serving() as served, tapped(served.target) as tap:
        num_connections: list[int] = []

        async def sources() -> AsyncIterator[tuple[int, ...]]:
            yield SOURCE
            num_connections.append(tap.num_connections)
            tap.received.clear()
            await tap.wait_for_pings(NUM_PINGS)
            yield SOURCE

        async with AsyncClient(tap.target, connection=Connection(keepalive_s=1)) as client:
            texts = [answer.text async for answer in client.generate_many(sources()) if isinstance(answer, Generation)]
        assert len(texts) == 2
        assert num_connections == [tap.num_connections]
