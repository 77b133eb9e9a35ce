"""A server with TLS while its certificates are renewed and clients of every kind connect: it answers correctly.

gRPC's server can free certificates that it still uses when it gets new ones. The process then crashed with 32 clients
that open a connection for each call, or that send the first bytes of a handshake and close.
"""

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.client import Connection, RetryPolicy
from antiphon.client.connection import SERVICE_NAME
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.certificates import Authority, Pair, as_pem, client_hello, renew, trusting
from tests.integration.process import PATIENCE_S, ServerProcess

pytestmark = pytest.mark.hardship

NUM_CLIENTS = 32
NUM_RENEWALS = 3
MAX_UNFINISHED = 300
# Runs of one storm: fewer did not always crash the faulty process.
NUM_CALLS, NUM_HANDSHAKES = 500, 3000
ASKED = pb.GenerateUnaryRequest(text="Eine Katze liest ein Buch.", options=pb.GenerateOptions(max_new_tokens=1))

Storm = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Secured:
    """Server, its pair of certificate files, and the connection of a client."""

    process: ServerProcess
    authority: Authority
    pair: Pair
    connection: Connection

    async def renewed(self) -> None:
        """Replace the pair; return when new connections to both gRPC ports receive the new one."""
        new = self.authority.server()
        renew(self.pair, new)
        async with asyncio.timeout(PATIENCE_S):
            for target in (self.process.target, self.process.admin_target):
                while await asyncio.to_thread(shown_by, target) != as_pem(new):
                    pass

    async def answer(self) -> str:
        """Make one call over a separate connection, without retries."""
        async with self.connection.open_async(self.process.target, SERVICE_NAME, is_shared=False) as channel:
            response = await InferenceServiceStub(channel).GenerateUnary(ASKED, timeout=PATIENCE_S)
        return response.outputs[0].text


@pytest.fixture(params=["tls", "mutual tls"])
def secured(request: pytest.FixtureRequest, bundle: Path, tmp_path: Path) -> Iterator[Secured]:
    authority = Authority(tmp_path)
    pair, client = authority.server(), authority.client("somebody")
    flags = [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", "--admin-port=0"]
    once = RetryPolicy(attempts=1)
    if request.param == "tls":
        connection = trusting(authority, retry=once)
    else:
        flags.append(f"--tls-client-ca={authority.file}")
        connection = trusting(authority, client, retry=once)
    with ServerProcess(bundle, flags) as process:
        yield Secured(process=process, authority=authority, pair=pair, connection=connection)
        assert process.process.poll() is None


@contextlib.asynccontextmanager
async def storming(storm: Storm, at_least: int) -> AsyncIterator[None]:
    """Run a storm repeatedly and concurrently; no run may fail. at_least: minimum number of runs."""
    num_done = itertools.count(1)

    async def rage() -> None:
        while not is_over.is_set() or next(num_done) < at_least:
            await storm()

    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(rage())
        yield
        is_over.set()


async def test_clients_that_connect_for_every_call_are_answered_during_renewals(secured: Secured) -> None:
    expected = await secured.answer()

    async def call() -> None:
        assert await secured.answer() == expected

    async with storming(call, at_least=NUM_CALLS):
        for _ in range(NUM_RENEWALS):
            await secured.renewed()


async def test_broken_hellos_during_renewals_do_not_end_the_server(secured: Secured) -> None:
    expected, hello = await secured.answer(), client_hello()

    async def break_off() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", secured.process.port)
        writer.write(hello[:11])
        await closed(writer)

    async with storming(break_off, at_least=NUM_HANDSHAKES):
        for _ in range(NUM_RENEWALS):
            await secured.renewed()
            assert await secured.answer() == expected


async def test_unfinished_handshakes_during_renewals_do_not_end_the_server(secured: Secured) -> None:
    expected, hello = await secured.answer(), client_hello()
    unfinished: list[asyncio.StreamWriter] = []

    async def leave_open() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", secured.process.port)
        unfinished.append(writer)
        writer.write(hello)
        await reader.read(1)  # the server has begun its part
        while len(unfinished) > MAX_UNFINISHED:
            await closed(unfinished.pop(0))

    async with storming(leave_open, at_least=NUM_HANDSHAKES):
        for _ in range(NUM_RENEWALS):
            await secured.renewed()
            assert await secured.answer() == expected
    for writer in unfinished:
        await closed(writer)
    await secured.renewed()


def shown_by(target: str) -> str:
    """Return the leaf certificate of a new connection, in PEM."""
    host, _, port = target.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S)


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection, even if the server has already closed it."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
