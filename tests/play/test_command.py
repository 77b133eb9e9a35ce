"""`antiphon play` without a browser: its address, its errors, its end, and servers with TLS and tokens."""

import hashlib
import json
import signal
import socket
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.process import ServerProcess, antiphon
from tests.play.conftest import SHIPPED
from tests.play.play_process import Addresses, PlayProcess


@pytest.mark.pages
def test_play_ends_with_success_at_an_interrupt(server: ServerProcess) -> None:
    with PlayProcess(server) as play:
        play.process.send_signal(signal.SIGINT)
        assert play.process.wait(timeout=60) == 0


@pytest.mark.pages
def test_play_listens_on_loopback_only(play: PlayProcess) -> None:
    addresses = {line.split()[1].rpartition(":")[0] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                 if line.split()[1].endswith(f":{play.port:04X}") and line.split()[3] == "0A"}  # fmt: skip
    assert addresses == {"0100007F"}


def test_used_port_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = antiphon("play", "--port", str(port))
    assert done.returncode == 2
    assert f"--port {port}: Address already in use" in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "65536 is not a port: 0 to 65535"),
        (["--metrics-url", "ftp://there"], "--metrics-url is 'ftp://there'; it must begin with http:// or https://"),
        (["--tls-ca", "missing.pem"], "--tls-ca is missing.pem, which cannot be read"),
    ],
)
def test_wrong_option_is_an_error_that_names_it(arguments: list[str], message: str) -> None:
    done = antiphon("play", "--port", "0", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.decode()


@pytest.mark.pages
def test_play_reports_a_server_that_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        target = f"127.0.0.1:{unused.getsockname()[1]}"
    with PlayProcess(Addresses(target, f"http://{target}/metrics")) as play:
        status, _, answer = play.request("GET", "/api/models")
        assert status == 503
        assert json.loads(answer)["error"]["code"] == "UNAVAILABLE"
        memory = json.loads(play.request("GET", "/api/memory")[2])
        assert memory["metrics"] is None
        assert memory["metrics_problem"].startswith(f"http://{target}/metrics cannot be read")


@pytest.mark.pages
def test_play_uses_a_server_with_mutual_tls_and_tokens(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, client = authority.server(), authority.client("someone")
    arguments = (
        f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={authority.file}", "--metrics-tls=true",
        f"--auth-tokens-file={write_token(tmp_path, 'alice')}", "--admin-port=0",
        f"--admin-tokens-file={write_token(tmp_path, 'operator')}",
    )  # fmt: skip
    flags = (
        "--tls-ca", str(authority.file), "--tls-cert", str(client.cert), "--tls-key", str(client.key),
        "--token-file", str(tmp_path / "alice.token"), "--admin-token-file", str(tmp_path / "operator.token"),
    )  # fmt: skip
    with ServerProcess(SHIPPED, arguments) as server, PlayProcess(server, flags) as play:
        models = json.loads(play.request("GET", "/api/models")[2])["models"]
        assert [model["name"] for model in models] == ["en-de"]
        assert play.post("/api/next-token", {"text": "How are you?"})["tokens"]
        memory = json.loads(play.request("GET", "/api/memory")[2])
        assert memory["metrics"]["models"]["en-de"]["running"] == 0
        assert memory["caches"][0]["num_blocks"] == models[0]["cache"]["num_blocks"]


def write_token(folder: Path, name: str) -> Path:
    """Write a token for a client, and return the file in which the server looks for it."""
    token = f"the token of {name}"
    (folder / f"{name}.token").write_text(token)
    path = folder / f"{name}.tokens"
    path.write_text(f"{name}:{hashlib.sha256(token.encode()).hexdigest()}\n")
    path.chmod(0o600)
    return path


@pytest.mark.pages
def test_play_in_front_of_workers_shows_the_cache_of_each(tmp_path: Path) -> None:
    with ServerProcess(SHIPPED, ["--workers", "2", "--admin-port", "0"]) as server, PlayProcess(server) as play:
        caches = json.loads(play.request("GET", "/api/memory")[2])["caches"]
        assert [cache["worker"] for cache in caches] == [0, 1]
        assert play.post("/api/next-token", {"text": "How are you?"})["tokens"]
