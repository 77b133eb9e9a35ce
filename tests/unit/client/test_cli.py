"""The command: help, imports and messages of missing packages, interrupts, `antiphon health`, and FIFOs as settings."""

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from antiphon.cli import main as cli
from antiphon.cli.health import _STATUSES, own_target
from antiphon.cli.lines import run_interruptible
from antiphon.cli.main import main
from antiphon.client import AsyncClient, Connection
from antiphon.client.connection import read_regular
from tests.certificates import Authority
from tests.serving import MODEL_NAME, SOURCE, serving


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, "antiphon "),
        ([], 2, "usage: antiphon"),
        (["sing"], 2, "usage: antiphon"),
        (["generate", "--no-such-flag"], 2, "usage: antiphon"),
        (["health", "--timeout-s", "0"], 2, "0 is not above 0"),
        *(
            ([name, "--help"], 0, rf"usage: antiphon {name}\b(.|\n)*  antiphon {name} ")
            for name, subcommand in cli.SUBCOMMANDS.items()
            if importlib.util.find_spec(subcommand.module) is not None
        ),
        *((["--help"], 0, rf"\n    {name}\s") for name in cli.SUBCOMMANDS),
    ],
)
def test_main_exits_with_what_the_command_line_asks_for(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == code
    written = capsys.readouterr()
    assert re.search(said, written.err if code else written.out)


def test_main_names_the_extra_of_a_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(subcommand: cli.Subcommand) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "load", absent)
    assert cli.main(["train", "x.toml"]) == 2
    assert capsys.readouterr().err == "antiphon train: torch is not installed; run: pip install 'antiphon[train]'\n"


def test_run_returns_the_result_of_the_coroutine() -> None:
    async def work() -> int:
        return 7

    assert run_interruptible(work()) == 7


def test_interrupt_cancels_the_running_coroutine() -> None:
    seen = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert seen == ["cancelled"]


def test_second_interrupt_ends_a_coroutine_that_ignores_the_first() -> None:
    async def work() -> None:
        for _ in range(2):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise AssertionError("the second interrupt was not raised")

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_signal_wakes_a_sleeping_loop() -> None:
    """Without a wake-up descriptor a signal just before the loop sleeps is not seen until something else wakes it."""

    async def wakeup_descriptor() -> int:
        found = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        return found

    assert asyncio.run(wakeup_descriptor()) == -1
    assert run_interruptible(wakeup_descriptor()) != -1


def test_other_cancellation_is_not_an_interrupt() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_interruptible(work())


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


async def ask(*flags: str) -> int:
    return await asyncio.to_thread(cli.main, ["health", *flags])


async def test_health_exits_with_0_when_the_server_and_its_model_are_ready(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        service = f"antiphon.v1.InferenceService/{MODEL_NAME}"
        assert await ask("--target", served.target) == 0
        assert await ask("--target", served.target, "--service", service) == 0
    assert capsys.readouterr().out == (
        f"antiphon health: {served.target} is SERVING\n"
        f"antiphon health: {served.target}, service {service}, is SERVING\n"
    )


async def test_health_exits_with_1_when_a_server_drains_or_does_not_know_the_service(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as served:
        await served.probes.leave()
        for flags, code, said in (
            ([], 1, " is NOT_SERVING"),
            (["--service", "liveness"], 0, ""),
            (["--service", "nobody"], 1, ", service nobody, is not known there"),
        ):
            assert await ask("--target", served.target, *flags) == code
            assert capsys.readouterr().err == (f"antiphon health: {served.target}{said}\n" if code else "")


async def test_health_exits_with_1_when_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:  # bound, so that no other process takes the port, and not listening
        silent.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await ask("--target", target) == 1
    assert capsys.readouterr().err.startswith(f"antiphon health: {target} gives no answer: ")


async def test_health_uses_the_port_that_the_environment_sets_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        monkeypatch.setenv("ANTIPHON_PROBE_PORT", served.target.rpartition(":")[2])
        monkeypatch.setenv("ANTIPHON_PORT", "1")
        assert await ask() == 0
    assert (own_target({"ANTIPHON_PORT": "6000"}), own_target({})) == ("127.0.0.1:6000", "127.0.0.1:50051")


@pytest.mark.parametrize(
    ("port", "flags", "message"),
    [
        *((port, [], f"ANTIPHON_PORT is {port!r}; it must be 1 to 65535") for port in ("", "0", "65536", "-1", "grpc")),
        ("1", ["--tls-ca", "/no/such"], "--tls-ca is /no/such, which cannot"),
    ],
)
def test_health_exits_with_2_when_a_setting_is_wrong(
    port: str, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_PORT", port)
    monkeypatch.delenv("ANTIPHON_PROBE_PORT", raising=False)
    assert cli.main(["health", *flags]) == 2
    assert message in capsys.readouterr().err


def test_health_sends_and_reads_messages_of_the_health_service() -> None:
    name = "antiphon.v1.InferenceService/größer"
    assert StringValue(value=name).SerializeToString() == HealthCheckRequest(service=name).SerializeToString()
    for number, status in enumerate(_STATUSES):
        answer = HealthCheckResponse(status=HealthCheckResponse.ServingStatus.Value(status))
        assert Int32Value.FromString(answer.SerializeToString()).value == number
    assert len(_STATUSES) == len(HealthCheckResponse.ServingStatus.keys())
