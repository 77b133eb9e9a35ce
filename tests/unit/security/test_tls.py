"""TLS of the ports with real clients: certificates, refused clients, handshakes and connections of a shared port."""

import asyncio
import contextlib
import datetime
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, Gauge

from antiphon.cli.main import main
from antiphon.client import AsyncClient, Client, Connection, RetryPolicy, ServerError
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.grpc_fixes.port_certificates import is_own
from antiphon.rpc.ports import serve_metrics
from antiphon.rpc.reloading import FileMetrics, FileProblem, Reloading
from antiphon.rpc.tls import TlsFiles, read_certificates
from antiphon.server import ports
from antiphon.server.access import Access
from antiphon.server.admin import AdminServicer, build_admin_server
from antiphon.server.ports import listening
from antiphon.server.settings import ServerConfig
from tests.certificates import Authority, Pair, as_pem, client_hello, encrypt, renew, replace, trusting
from tests.serving import SOURCE, Gate, Serving, serving
from tests.waits import client_waits

ONCE = RetryPolicy(attempts=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def shown_by(target: str) -> str:
    """Return the leaf certificate that a new connection receives, in PEM."""
    host, _, port = target.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=30)


async def is_shown(served: Serving, pair: Pair) -> None:
    """Wait until new connections receive a pair's certificate; servers check for a new one once a second."""
    async with asyncio.timeout(60):
        while await asyncio.to_thread(shown_by, served.target) != as_pem(pair):
            pass


async def ask(served: Serving, connection: Connection) -> str:
    async with AsyncClient(served.target, connection=connection) as client:
        return (await client.generate_text(SOURCE, timeout_s=60)).text


async def test_tls_serves_clients_that_trust_the_authority(authority: Authority) -> None:
    pair = authority.server()
    async with serving(tls_cert=pair.cert, tls_key=pair.key) as served:
        whole = await ask(served, trusting(authority))

        def synchronously() -> str:
            with Client(served.target, connection=trusting(authority)) as client:
                return client.generate_text(SOURCE).text

        assert whole == await asyncio.to_thread(synchronously) != ""


async def test_client_refuses_a_server_of_another_authority(authority: Authority, tmp_path: Path) -> None:
    pair, stranger = authority.server(), Authority(tmp_path, "stranger")
    async with serving(tls_cert=pair.cert, tls_key=pair.key) as served:
        for connection in (trusting(stranger, retry=ONCE), Connection(retry=ONCE)):
            with pytest.raises(ServerError) as caught:
                await ask(served, connection)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_client_certificate_is_required_and_names_the_caller(authority: Authority, tmp_path: Path) -> None:
    pair, stranger = authority.server(), Authority(tmp_path, "stranger")
    async with serving(tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.file) as served:
        for connection in (trusting(authority, retry=ONCE), trusting(authority, stranger.client("a"), retry=ONCE)):
            with pytest.raises(ServerError) as caught:
                await ask(served, connection)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        names = {
            "worker-7": authority.client("someone@example.org", common_name="worker-7"),
            "someone@example.org": authority.client("someone@example.org"),
        }
        for client in names.values():
            await ask(served, trusting(authority, client))
        await served.settled()
        assert [call.caller for call in served.ended] == list(names)


async def test_renewed_pair_is_presented_to_new_connections_and_running_streams_continue(authority: Authority) -> None:
    pair, old, new = authority.server(), authority.server(), authority.server()
    renew(pair, old)
    gates: list[Gate] = []
    async with serving(prepare=lambda r: gates.append(Gate(r)), tls_cert=pair.cert, tls_key=pair.key) as served:
        async with AsyncClient(served.target, connection=trusting(authority)) as client:
            stream = client.generate(SOURCE)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(gates[0].reached.wait)
            assert await asyncio.to_thread(shown_by, served.target) == as_pem(old)
            renew(pair, new)
            await is_shown(served, new)
            gates[0].open()
            streamed = (await first).text + "".join([delta.text async for delta in stream])
        assert streamed == await ask(served, trusting(authority)) != ""
        assert served.registry.get_sample_value("antiphon_tls_reloads_total", {"result": "ok"}) == 1


async def test_old_pair_stays_in_use_when_the_new_one_is_broken(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, other = authority.server(), authority.server()
    before = as_pem(pair)
    async with serving(tls_cert=pair.cert, tls_key=pair.key) as served:
        replace(pair.key, other.key.read_bytes())
        async with asyncio.timeout(60):
            while not served.registry.get_sample_value("antiphon_tls_reloads_total", {"result": "failed"}):
                assert await asyncio.to_thread(shown_by, served.target) == before
        assert await asyncio.to_thread(shown_by, served.target) == before
        assert served.registry.get_sample_value("antiphon_tls_reloads_total", {"result": "failed"}) == 1
        assert [record.levelname for record in caplog.records if str(pair.key) in record.message] == ["ERROR"]
        replace(pair.cert, other.cert.read_bytes())
        await is_shown(served, other)


async def test_replaced_symlink_renews_the_pair(authority: Authority, tmp_path: Path) -> None:
    """Renew the files as Kubernetes renews a secret: the files do not change, but their folder is replaced."""
    old, new = authority.server(), authority.server()
    for name, pair in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        for part in ("cert", "key"):
            (tmp_path / name / part).write_bytes(getattr(pair, part).read_bytes())
    (tmp_path / "data").symlink_to("old")
    async with serving(tls_cert=tmp_path / "data" / "cert", tls_key=tmp_path / "data" / "key") as served:
        assert await asyncio.to_thread(shown_by, served.target) == as_pem(old)
        (tmp_path / "fresh").symlink_to("new")
        (tmp_path / "fresh").replace(tmp_path / "data")
        await is_shown(served, new)


def _another_key(pair: Pair, authority: Authority) -> None:
    pair.key.write_bytes(authority.server().key.read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pair, authority: pair.cert.unlink(), "tls_cert is {cert}, which cannot be read: No such file"),
        (lambda pair, authority: pair.key.unlink(), "tls_key is {key}, which cannot be read: No such file"),
        (lambda pair, authority: pair.cert.write_text("no"), "tls_cert is {cert}, which holds no certificate"),
        (lambda pair, authority: pair.cert.write_bytes(b"\xff"), "tls_cert is {cert}, which holds no certificate"),
        (lambda pair, authority: pair.key.write_text("no"), "tls_key is {key}, which holds no private key"),
        (lambda pair, authority: pair.key.write_bytes(b"a" * 2**21), "tls_key is {key}, which cannot be read: it is"),
        (lambda pair, authority: encrypt(pair.key), "tls_key is {key}, which is encrypted"),
        (_another_key, "tls_key is {key}, which is not the key of tls_cert, {cert}"),
    ],
)
def test_unusable_pair_is_refused_by_the_name_of_its_file(
    spoil: Callable[[Pair, Authority], None], message: str, authority: Authority
) -> None:
    pair = authority.server()
    read_certificates(TlsFiles(cert=pair.cert, key=pair.key, client_ca=authority.file))
    spoil(pair, authority)
    with pytest.raises(FileProblem) as caught:
        read_certificates(TlsFiles(cert=pair.cert, key=pair.key))
    assert str(caught.value).startswith(message.format(cert=pair.cert, key=pair.key))


def test_expired_certificate_and_file_without_authorities_are_refused(authority: Authority) -> None:
    expired, pair = authority.expired_server(), authority.server()
    with pytest.raises(FileProblem, match=r"^tls_cert is .*, which no client would accept: certificate has expired"):
        read_certificates(TlsFiles(cert=expired.cert, key=expired.key))
    with pytest.raises(FileProblem, match=r"^tls_client_ca is .*key, which holds no certificate"):
        read_certificates(TlsFiles(cert=pair.cert, key=pair.key, client_ca=pair.key))


def test_expiry_equals_that_of_the_certificate(authority: Authority) -> None:
    from cryptography import x509

    pair = authority.server()
    expected = x509.load_pem_x509_certificate(pair.cert.read_bytes()).not_valid_after_utc.timestamp()
    assert read_certificates(TlsFiles(cert=pair.cert, key=pair.key)).expires_s == expected


def test_metrics_over_https_follow_the_renewed_pair(authority: Authority) -> None:
    pair, new = authority.server(), authority.server()
    registry = CollectorRegistry()
    Gauge("answer", "Of everything.", registry=registry).set(42)
    files = TlsFiles(cert=pair.cert, key=pair.key, client_ca=authority.file)
    metrics = FileMetrics(MetricFamilies(registry))
    certificates = Reloading(files.paths, lambda: read_certificates(files), metrics.count_tls)
    server = serve_metrics("127.0.0.1", 0, registry, lambda: certificates.current().https)
    client = authority.client("prometheus")
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(client.cert, client.key)
    try:
        for expected in (pair, new):
            renew(pair, expected)
            url = f"https://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, context=context, timeout=30) as response:
                assert b"answer 42.0" in response.read()
        anonymous = ssl.create_default_context(cafile=authority.file)
        # With TLS 1.3 the client sends its request before the server refuses it: either of its writes or reads fails.
        with pytest.raises(OSError, match=r"(?i)certificate required|alert|closed|reset|EOF|broken pipe"):
            urllib.request.urlopen(url, context=anonymous, timeout=30)
        assert registry.get_sample_value("antiphon_tls_reloads_total", {"result": "ok"}) == 2
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tls-cert={cert}",), "tls_cert is {cert} and tls_key is unset; TLS needs both"),
        (("--tls-key={key}",), "tls_key is {key} and tls_cert is unset; TLS needs both"),
        (("--tls-client-ca={ca}",), "tls_client_ca is {ca} and tls_cert is unset; it needs tls_cert and tls_key"),
        (("--metrics-tls=true",), "metrics_tls is True and tls_cert is unset; it needs tls_cert and tls_key"),
        (("--tls-cert={cert}", "--tls-key={ca}"), "tls_key is {ca}, which holds no private key in PEM"),
        (("--tls-cert={cert}", "--tls-key=/nowhere"), "tls_key is /nowhere, which cannot be read: No such file"),
        (("--auth-tokens-file={ca}",), "auth_tokens_file is {ca}, whose line 1 is not NAME:SHA256"),
        (
            ("--auth-tokens-file={ca}", "--admin-port=0"),
            "auth_tokens_file and admin_port are set and admin_tokens_file",
        ),
        (("--max-connection-age-grace-s=9",), "max_connection_age_grace_s is set and max_connection_age_s is not"),
    ],
)
def test_server_does_not_start_with_invalid_access_settings(
    flags: tuple[str, ...], message: str, authority: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = authority.server()
    names = {"cert": pair.cert, "key": pair.key, "ca": authority.file}
    given = [flag.format(**names) for flag in flags]
    assert main(["serve", "--port=0", "--metrics-port=0", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"antiphon serve: {message.format(**names)}")


# Less than gRPC's own handshake timeout, which is two minutes.
PATIENCE_S = 60


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
    wrong = [authority.client("late", not_after=yesterday), Authority(tmp_path, "stranger").client("stranger"), None]
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


# Accepts one connection on the socket that it inherits, says so, and holds it.
_ACCEPT = (
    "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); c = s.accept(); print('here', flush=True); "
    "sys.stdin.read()"
)
ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


@pytest.fixture(params=ADDRESSES, ids=["IPv4", "IPv6"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, address = request.param
    with socket.create_server((address, 0), family=family) as made:
        yield made


def test_connection_that_this_process_accepted_is_its_own(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2]) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert is_own(client)
        assert not is_own(client)


def test_connection_over_ipv4_to_a_socket_of_both_families_is_its_own() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert is_own(client)


def test_connection_that_another_process_accepted_is_not(listener: socket.socket) -> None:
    number = listener.fileno()
    command = [sys.executable, "-c", _ACCEPT, str(number)]
    with (
        subprocess.Popen(command, pass_fds=[number], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"here\n"
        assert not is_own(client)
        other.stdin.close()
