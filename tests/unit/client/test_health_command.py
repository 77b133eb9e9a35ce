"""`antiphon health` with a live health service: exit codes and messages."""

from __future__ import annotations

import asyncio
import socket

import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from antiphon.cli import main as cli
from antiphon.cli.health import _STATUSES, own_target
from tests.serving import MODEL_NAME, serving


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


async def test_health_exits_with_1_for_readiness_and_0_for_liveness_while_the_server_drains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as served:
        await served.probes.leave()
        assert await ask("--target", served.target) == 1
        assert await ask("--target", served.target, "--service", "liveness") == 0
    assert capsys.readouterr().err == f"antiphon health: {served.target} is NOT_SERVING\n"


async def test_health_exits_with_1_for_an_unknown_service(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served:
        assert await ask("--target", served.target, "--service", "nobody") == 1
    assert capsys.readouterr().err == f"antiphon health: {served.target}, service nobody, is not known there\n"


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


def test_own_target_is_the_default_when_no_variable_is_set() -> None:
    assert own_target({"ANTIPHON_PORT": "6000"}) == "127.0.0.1:6000"
    assert own_target({}) == "127.0.0.1:50051"


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "grpc"])
def test_health_exits_with_2_when_the_port_is_invalid(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_PORT", port)
    monkeypatch.delenv("ANTIPHON_PROBE_PORT", raising=False)
    assert cli.main(["health"]) == 2
    assert f"ANTIPHON_PORT is {port!r}; it must be 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--timeout-s", "0"], "0 is not above 0"), (["--tls-ca", "/no/such"], "--tls-ca is /no/such, which cannot")],
)
def test_health_exits_with_2_when_a_flag_is_wrong(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["health", *flags])
    except SystemExit as left:  # the exit of argparse
        code = int(left.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_health_sends_and_reads_messages_of_the_health_service() -> None:
    name = "antiphon.v1.InferenceService/größer"
    assert StringValue(value=name).SerializeToString() == HealthCheckRequest(service=name).SerializeToString()
    for number, status in enumerate(_STATUSES):
        answer = HealthCheckResponse(status=HealthCheckResponse.ServingStatus.Value(status))
        assert Int32Value.FromString(answer.SerializeToString()).value == number
    assert len(_STATUSES) == len(HealthCheckResponse.ServingStatus.keys())
