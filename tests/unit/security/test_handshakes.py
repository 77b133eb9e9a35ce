"""Clients that do not finish a handshake are disconnected after its time limit, on every gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from antiphon.client import AsyncClient, RetryPolicy, ServerError
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.reloading import FileMetrics
from antiphon.server import ports
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer, build_admin_server
from antiphon.server.ports import listening
from antiphon.server.settings import ServerConfig
from tests.certificates import Authority, client_hello, trusting
from tests.serving import SOURCE, serving
from tests.waits import client_waits

# Less than gRPC's own handshake timeout, which is two minutes.
PATIENCE_S = 60


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def settings(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return settings of a server with client certificates and a short time limit for handshakes."""
    option = (ports.HANDSHAKE_OPTION[0], 300)
    monkeypatch.setattr(ports, "HANDSHAKE_OPTION", option)
    pair = authority.server()
    return {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.file}


@contextlib.asynccontextmanager
async def admin_port(settings: dict[str, Any]) -> AsyncIterator[int]:
    """Serve the admin service of no model."""
    config = ServerConfig(**settings)
    families = MetricFamilies(CollectorRegistry())
    nothing: Any = None  # no call is made
    server = build_admin_server(AdminServicer(nothing, nothing, config), Telemetry(families), client_waits())
    certificates = Access(config, FileMetrics(families)).port_certificates()
    async with listening(server, "127.0.0.1", 0, certificates) as port:
        yield port


@contextlib.asynccontextmanager
async def main_port(settings: dict[str, Any]) -> AsyncIterator[int]:
    async with serving(**settings) as served:
        yield int(served.target.rpartition(":")[2])


@pytest.mark.parametrize("open_one", [main_port, admin_port])
async def test_unfinished_handshakes_are_ended(open_one: Any, settings: dict[str, Any]) -> None:
    hello = client_hello()
    async with open_one(settings) as port, asyncio.timeout(PATIENCE_S):
        for sent in (b"", hello[:11], hello):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await read_to_the_end(reader)
            writer.close()


async def test_client_is_disconnected_when_it_sends_nothing_after_its_handshake(
    authority: Authority, settings: dict[str, Any]
) -> None:
    client = authority.client("somebody")
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(client.cert, client.key)
    context.set_alpn_protocols(["h2"])
    async with main_port(settings) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        await read_to_the_end(reader)
        writer.close()


async def read_to_the_end(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


async def test_wrong_client_certificates_are_refused_and_valid_ones_are_served(
    authority: Authority, settings: dict[str, Any], tmp_path: Path
) -> None:
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    wrong = [
        authority.client("late", not_after=yesterday),
        Authority(tmp_path, "stranger").client("stranger"),
        None,
    ]
    async with serving(**settings) as served:
        for pair in wrong * 3:
            connection = trusting(authority, pair, retry=RetryPolicy(attempts=1))
            async with AsyncClient(served.target, connection=connection) as client:
                with pytest.raises(ServerError) as caught:
                    await client.generate_text(SOURCE, timeout_s=PATIENCE_S)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        connection = trusting(authority, authority.client("somebody"), retry=RetryPolicy(attempts=1))
        async with AsyncClient(served.target, connection=connection) as client:
            assert (await client.generate_text(SOURCE, timeout_s=PATIENCE_S)).text
