"""The metrics port with clients that hold connections, send slowly or use up descriptors: scrapes still work."""

import contextlib
import gzip
import os
import resource
import select
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from antiphon.rpc.ports import MAX_SCRAPES, serve_metrics
from tests.certificates import Authority

# Much longer than any step of these tests: turns a hang into a failure.
PATIENCE_S = 60
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "Of everything.", registry=registry).set(42)
    return registry


@contextlib.contextmanager
def served(
    registry: CollectorRegistry, *, timeout_s: float = 10.0, tls: Callable[[], ssl.SSLContext] | None = None
) -> Iterator[WSGIServer]:
    server = serve_metrics("127.0.0.1", 0, registry, tls, timeout_s=timeout_s)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def idle(server: WSGIServer, num: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.server_port)
        yield [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(num)]


def scrape(server: WSGIServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=PATIENCE_S) as response:
        return bytes(response.read())


def trickle(connection: socket.socket, data: bytes) -> None:
    """Send single bytes until the server closes the connection."""
    end_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        for at in range(10_000):
            connection.send(data[at % len(data) :][:1])
            is_readable, _, _ = select.select([connection], [], [], 0.05)
            if is_readable and not connection.recv(4096):
                return
            assert time.monotonic() < end_s, "the server never closed the connection"


# Accept headers of other clients, and of Prometheus by version.
_OPEN_METRICS = "application/openmetrics-text;version=1.0.0"
ACCEPTED = {
    "none": None,
    "any": "*/*",
    "JSON": "application/json",
    "2.0": "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "2.50": f"{_OPEN_METRICS},application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5",
    "3": f"{_OPEN_METRICS};escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2",
}


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=ACCEPTED)
def test_scrape_has_the_type_of_its_format(registry: CollectorRegistry, accepted: str | None, encoding: str) -> None:
    """A wrong or missing type ends a scrape of Prometheus 3 (prometheus/prometheus#9430, #3208, jmx_exporter#1084)."""
    headers = {"Accept-Encoding": encoding} | ({} if accepted is None else {"Accept": accepted})
    with served(registry) as server:
        request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            content, kind = response.read(), response.headers["Content-Type"]
            packed = response.headers["Content-Encoding"] == "gzip"
    assert packed == (encoding == "gzip")
    parsers: dict[str, Any] = {"application/openmetrics-text": openmetrics_families, "text/plain": text_families}
    (family,) = parsers[kind.split(";")[0]]((gzip.decompress(content) if packed else content).decode())
    assert [sample.value for sample in family.samples] == [42.0]
    assert "version=" in kind


def test_scrape_that_sends_single_bytes_ends_at_its_time_limit(registry: CollectorRegistry) -> None:
    with served(registry, timeout_s=0.5) as server, idle(server, 1) as (connection,):
        trickle(connection, b"GET /metrics?" + b"a" * 1000)
        assert b"answer 42.0" in scrape(server)


def test_handshake_of_single_bytes_ends_at_its_time_limit(registry: CollectorRegistry, authority: Authority) -> None:
    pair = authority.server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    # The head of a long ClientHello, followed by single bytes.
    hello = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb" + bytes(16_000)
    with served(registry, timeout_s=0.5, tls=lambda: context) as server, idle(server, 1) as (connection,):
        trickle(connection, hello)


def test_scrapes_work_beside_connections_that_send_nothing(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    with served(registry, timeout_s=PATIENCE_S) as server, idle(server, 5 * MAX_SCRAPES):
        for _ in range(3):
            assert b"answer 42.0" in scrape(server)
        assert threading.active_count() - before <= MAX_SCRAPES + 1  # and the accepting one


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Limit the descriptors to those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connection_waits_without_a_busy_loop_when_no_descriptor_is_free(registry: CollectorRegistry) -> None:
    with served(registry) as server, socket.socket() as connection:
        connection.settimeout(PATIENCE_S)
        (acceptor,) = (thread for thread in threading.enumerate() if thread.name == "metrics")
        assert acceptor.ident is not None
        clock = time.pthread_getcpuclockid(acceptor.ident)
        with no_descriptor_left():
            connection.connect(("127.0.0.1", server.server_port))
            connection.sendall(REQUEST)
            before_s = time.clock_gettime(clock)
            assert not select.select([connection], [], [], 2.0)[0]  # CPU time is measured over 2 s
            assert time.clock_gettime(clock) - before_s < 0.2  # a busy loop uses 2 s, or its share of a core
        assert b"answer 42.0" in b"".join(iter(lambda: connection.recv(65536), b""))
