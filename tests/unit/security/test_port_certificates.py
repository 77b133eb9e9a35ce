"""Renewal of one port's certificates: its connections, their order, and failures."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from antiphon.client.connection import SERVICE_NAME
from antiphon.rpc.grpc_fixes import port_certificates
from antiphon.rpc.grpc_fixes.port_certificates import PortCertificates, _Offer
from antiphon.rpc.reloading import Reloading
from antiphon.rpc.tls import Certificates, TlsFiles, read_certificates
from antiphon.server.ports import close_port, open_port
from tests.certificates import Authority, Pair, as_pem, renew, trusting
from tests.serving import serving
from tests.waits import comes_true

PATIENCE_S = 60


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_certificates, "_POLL_S", 0.05)


class Followed:
    """Pair of files and the objects that watch it. failed: set when a renewal has failed."""

    def __init__(self, authority: Authority) -> None:
        self.pair = authority.server()
        self.failed = threading.Event()
        files = TlsFiles(cert=self.pair.cert, key=self.pair.key)
        self.reloading: Reloading[Certificates] = Reloading(
            files.paths, lambda: read_certificates(files), lambda result: None
        )
        self.certificates = PortCertificates(self.reloading, needs_client=False, on_failure=self.failed.set)


class Port:
    """TLS port without gRPC that requests certificates like gRPC. It begins handshakes and ends none.

    takes: for each connection, whether it received new certificates. connections: the server's ends.
    """

    def __init__(self, offer: _Offer, shown: ssl.SSLContext, then_shown: ssl.SSLContext) -> None:
        self._offer = offer
        self._contexts = {False: shown, True: then_shown}
        self.takes: list[bool] = []
        self.connections: list[socket.socket] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed by the test
            while True:
                connection, _ = self.socket.accept()
                self.takes.append(self._offer.take() is not None)
                self.connections.append(connection)
                self._begin(connection, self._contexts[any(self.takes)])

    def _begin(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        incoming.write(connection.recv(1 << 16))
        with contextlib.suppress(ssl.SSLWantReadError):
            server.do_handshake()
        connection.sendall(outgoing.read())


@contextlib.contextmanager
def listening(followed: Followed, shown: ssl.SSLContext, then_shown: ssl.SSLContext) -> Iterator[Port]:
    port = Port(followed.certificates._offer, shown, then_shown)
    followed.certificates.follow("127.0.0.1", port.port)
    try:
        yield port
    finally:
        port.socket.close()
        for connection in port.connections:
            connection.close()


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


async def shows(followed: Followed, new: Certificates) -> None:
    await comes_true(lambda: followed.certificates._shown is new)


async def test_guard_connects_before_certificates_are_offered_and_stays(authority: Authority) -> None:
    """Without the guard, gRPC may free certificates while another thread uses them, and the process dies."""
    followed = Followed(authority)
    old = followed.reloading.current()
    renew(followed.pair, authority.server())
    new = followed.reloading.current()
    with listening(followed, old.https, new.https) as port:
        await shows(followed, new)
        assert port.takes == [False, True]
        guard, second = port.connections
        assert is_open(guard)
        second.settimeout(PATIENCE_S)
        assert second.recv(1) == b""
        await followed.certificates.close()
        assert not is_open(guard)


async def test_nothing_is_offered_when_the_port_presents_another_certificate(authority: Authority) -> None:
    followed, stranger = Followed(authority), Followed(authority)
    renew(followed.pair, authority.server())
    context = stranger.reloading.current().https
    with listening(followed, context, context) as port:
        assert await asyncio.to_thread(followed.failed.wait, PATIENCE_S)
        assert not any(port.takes)
        await followed.certificates.close()


async def test_nothing_is_offered_to_a_silent_port(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(authority)
    with socket.socket() as silent:  # bound, so that no other process takes the port, and not listening
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        followed.certificates.follow("127.0.0.1", port)
        renew(followed.pair, authority.server())
        assert await asyncio.to_thread(followed.failed.wait, PATIENCE_S)
        await followed.certificates.close()
    assert followed.certificates._offer.take() is None
    assert f"port {port} keeps its certificate and tries again: Connection refused" in caplog.messages


async def test_renewal_that_a_stopping_server_breaks_off_has_not_failed(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_certificates, "_TIMEOUT_S", PATIENCE_S)
    followed = Followed(authority)
    with socket.create_server(("127.0.0.1", 0)) as port:
        followed.certificates.follow("127.0.0.1", port.getsockname()[1])
        renew(followed.pair, authority.server())
        connection, _ = await asyncio.to_thread(port.accept)
        followed.certificates.end_renewals()
        connection.close()
        await followed.certificates.close()
    assert not followed.failed.is_set()


async def test_certificates_are_offered_again_when_the_port_did_not_present_them(authority: Authority) -> None:
    followed = Followed(authority)
    old = followed.reloading.current()
    renew(followed.pair, authority.server())
    new = followed.reloading.current()
    with listening(followed, old.https, old.https) as port:
        assert await asyncio.to_thread(followed.failed.wait, PATIENCE_S)
        port._contexts[True] = new.https
        await shows(followed, new)
        await followed.certificates.close()


def test_offer_is_accepted_once_and_only_until_the_guard_expires(authority: Authority) -> None:
    new = Followed(authority).reloading.current().grpc
    offer = _Offer()
    assert offer.take() is None
    offer.make(new, until_s=time.monotonic() + PATIENCE_S)
    assert [offer.take(), offer.take(), offer.withdraw()] == [new, None, True]
    offer.make(new, until_s=time.monotonic())
    assert [offer.take(), offer.withdraw(), offer.withdraw()] == [None, False, True]


@contextlib.asynccontextmanager
async def grpc_port(followed: Followed, host: str) -> AsyncIterator[int]:
    server = grpc.aio.server()
    port = await open_port(server, host, 0, followed.certificates)
    try:
        yield port
    finally:
        await close_port(server, followed.certificates, None)


def can_listen(host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
    ],
)
async def test_every_address_of_a_host_presents_the_new_certificate(
    host: str, addresses: list[str], authority: Authority
) -> None:
    if ":" in host and not can_listen("::1"):
        pytest.skip("this machine has no IPv6")
    followed = Followed(authority)
    async with grpc_port(followed, host) as port:
        new = authority.server()
        renew(followed.pair, new)
        for address in addresses:
            await is_shown(address, port, new)
    assert not followed.failed.is_set()


async def is_shown(address: str, port: int, pair: Pair, refusals: tuple[type[OSError], ...] = ()) -> None:
    """Wait until new connections receive a pair's certificate. refusals: errors of a full port, which may pass."""
    shown = None
    async with asyncio.timeout(PATIENCE_S):
        while shown != as_pem(pair):
            with contextlib.suppress(*refusals):
                shown = await asyncio.to_thread(ssl.get_server_certificate, (address, port), timeout=PATIENCE_S)


async def test_renewal_waits_for_a_port_that_accepts(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "antiphon")
    pair, new = authority.server(), authority.server()
    async with serving(tls_cert=pair.cert, tls_key=pair.key, max_connections=2) as served:
        port = int(served.target.rpartition(":")[2])
        async with contextlib.AsyncExitStack() as clients:
            for _ in range(2):
                channel = trusting(authority).open_async(served.target, SERVICE_NAME, is_shared=False)
                await (await clients.enter_async_context(channel)).channel_ready()
            renew(pair, new)
            await is_logged(f"port {port} keeps its certificate and tries again: ", caplog)
            assert served.registry.get_sample_value("antiphon_tls_reloads_total", {"result": "failed"}) != 0
        await is_logged(f"port {port} presents the new certificate", caplog)
        # The connection of the renewal itself may still count as one of the two.
        await is_shown("127.0.0.1", port, new, refusals=(ssl.SSLZeroReturnError, ConnectionResetError))


async def is_logged(beginning: str, caplog: pytest.LogCaptureFixture) -> None:
    await comes_true(lambda: any(message.startswith(beginning) for message in caplog.messages))
