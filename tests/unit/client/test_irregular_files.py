"""Settings and flags that name a FIFO are refused at once with one line, instead of waiting for a writer."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.client import AsyncClient, Connection
from antiphon.client.connection import read_regular
from tests.certificates import Authority
from tests.serving import SOURCE, serving

PATIENCE_S = 60


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def code_of(*arguments: str) -> int:
    """Run one subcommand in a daemon thread, so that a wait for the FIFO cannot block the test."""
    future: Future[int] = Future()
    threading.Thread(target=lambda: future.set_result(main(list(arguments))), daemon=True).start()
    return future.result(PATIENCE_S)


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file"])
def test_server_refuses_a_fifo(setting: str, fifo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.file, setting: fifo}
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    assert code_of("serve", "--port=0", "--metrics-port=0", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"antiphon serve: {setting} is {fifo}, which cannot be read: it is not a regular file"


@pytest.mark.parametrize("flag", ["--tls-ca", "--tls-cert", "--tls-key", "--token-file"])
@pytest.mark.parametrize("command", [("health",), ("generate", "How are you?"), ("models", "list")])
def test_client_refuses_a_fifo(
    command: tuple[str, ...], flag: str, fifo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Authority(tmp_path).server()
    files = {"--tls-cert": pair.cert, "--tls-key": pair.key, flag: fifo}
    assert code_of(*command, "--tls", *(f"{name}={path}" for name, path in files.items())) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} is {fifo}, which cannot be read: it is not a regular file" in line


async def test_call_fails_when_its_token_file_has_become_a_fifo(fifo: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with serving() as served, AsyncClient(served.target, connection=Connection(token_file=token)) as client:
        await client.generate_text(SOURCE, timeout_s=PATIENCE_S)
        os.replace(fifo, token)  # noqa: PTH105 - ruff reports the method of Path as blocking
        with pytest.raises(ValueError, match=r"^token_file is .*token, which cannot be read: it is not a regular file"):
            await client.generate_text(SOURCE, timeout_s=PATIENCE_S)


def test_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_regular(path, 3) == b"abc"
    with pytest.raises(OSError, match="it is larger than 2 bytes"):
        read_regular(path, 2)
