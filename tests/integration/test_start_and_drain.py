"""Start and shutdown of a real process, as clients and probes observe them.

A test blocks a start with a bundle whose manifest is a pipe, which the server reads when the test writes it.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.bundle.manifest import MANIFEST_NAME
from antiphon.client import AsyncClient, Options, ServerError
from antiphon.client.admin_client import AdminClient
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.conftest import SENTENCES
from tests.integration.faulty_engine import held_engine
from tests.integration.process import ANTIPHON, PATIENCE_S, ServerProcess, environment, num_submitted, terminated
from tests.serving import details_of

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ENDLESS = Options(max_new_tokens=2048)
ONE_TOKEN = pb.GenerateOptions(max_new_tokens=1)
NO_RETRIES = [("grpc.enable_retries", 0)]


@pytest.fixture
def held(bundle: Path, tmp_path: Path) -> Path:
    """Make a bundle that cannot be read before the test writes its manifest."""
    copy = tmp_path / "held"
    shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    os.mkfifo(copy / MANIFEST_NAME)
    return copy


@contextlib.contextmanager
def starting(bundle: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield it and its future address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*ANTIPHON, "serve", str(bundle), "--port", str(port), "--metrics-port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def channel_to(target: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connected channel without retries."""
    async with grpc.aio.insecure_channel(target, options=NO_RETRIES) as channel:
        async with asyncio.timeout(PATIENCE_S):
            await channel.channel_ready()
        yield channel


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def refusal_of(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    stub: Any = InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]), timeout=PATIENCE_S)
    assert not caught.value.initial_metadata()  # another server can be tried
    return caught.value


async def test_port_answers_while_the_model_is_loaded(held: Path, bundle: Path) -> None:
    with starting(held) as (process, target):
        async with channel_to(target) as channel:
            services = ("", "antiphon.v1.InferenceService")
            assert [await health_of(channel, service) for service in services] == [NOT_SERVING] * 2
            assert await health_of(channel, "liveness") == SERVING
            error = await refusal_of(channel)
            assert (error.code(), details_of(error).reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == NOT_SERVING
            await asyncio.to_thread((held / MANIFEST_NAME).write_bytes, (bundle / MANIFEST_NAME).read_bytes())
            assert (await watch.read()).status == SERVING
            answer = await InferenceServiceStub(channel).GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
            assert answer.outputs
        assert process.stdout is not None
        assert "ready" in await asyncio.to_thread(process.stdout.readline)


@pytest.mark.combinations
async def test_sigterm_ends_the_process_at_once_while_the_model_is_loaded(held: Path) -> None:
    with starting(held) as (process, target):
        async with channel_to(target):
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in errors) == (0, False)


@pytest.mark.combinations
async def test_sigterm_cancels_a_running_load_and_its_caller_receives_an_error(held: Path, bundle: Path) -> None:
    with ServerProcess(bundle, ["--admin-port", "0"]) as server:
        assert server.admin_target is not None
        with AdminClient(server.admin_target) as admin:
            loading = asyncio.ensure_future(asyncio.to_thread(admin.load_model, "second", str(held)))
            pipe = await asyncio.to_thread((held / MANIFEST_NAME).open, "wb")  # opens when the server reads it
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ServerError) as caught:
                await loading
        code, errors = await asyncio.to_thread(server.finish)
        pipe.close()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert (code, "Traceback" in errors) == (0, False)


@pytest.mark.combinations
async def test_requests_are_served_during_the_drain_delay_after_probes_report_not_serving(bundle: Path) -> None:
    with ServerProcess(bundle, ["--drain-delay-s", "1"]) as server:
        async with channel_to(server.target) as channel:
            await terminated(server, channel)
            assert await health_of(channel, "liveness") == SERVING
            late = InferenceServiceStub(channel).GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
            assert (await late).outputs
        assert (await asyncio.to_thread(server.finish))[0] == 0


@pytest.mark.combinations
async def test_sigterm_finishes_waiting_requests_too(bundle: Path, tmp_path: Path) -> None:
    """No accepted request is lost: two have rows, and one may be encoded early, when the signal arrives."""
    options = Options(max_new_tokens=20)
    with (
        held_engine(tmp_path) as engine,
        ServerProcess(bundle, ["--max-num-seqs", "2"], prefix=engine.prefix) as server,
    ):
        async with AsyncClient(server.target) as client, channel_to(server.target) as channel:
            calls = [asyncio.ensure_future(client.generate_text(text, options)) for text in SENTENCES[:12]]
            now = await asyncio.to_thread(server.wait_for_metrics, lambda now: num_submitted(now) == len(calls))
            assert now["antiphon_num_requests_waiting"] >= len(calls) - 3
            await terminated(server, channel)
            assert (await refusal_of(channel)).code() is grpc.StatusCode.UNAVAILABLE  # it drains
            engine.release()
            answers = await asyncio.gather(*calls)
        code, _ = await asyncio.to_thread(server.finish)
    assert [len(answer.token_ids) > 0 for answer in answers] == [True] * len(calls)
    assert code == 0


@pytest.mark.combinations
async def test_second_signal_ends_the_process_at_once_in_the_drain_delay(bundle: Path) -> None:
    with ServerProcess(bundle, ["--drain-delay-s", "3600"]) as server:
        async with channel_to(server.target) as channel:
            await terminated(server, channel)
            server.process.send_signal(signal.SIGINT)
            code, _ = await asyncio.to_thread(server.finish)
    assert code == 128 + signal.SIGINT


@pytest.mark.combinations
async def test_calls_that_reach_a_closing_server_end_with_unavailable(bundle: Path) -> None:
    """gRPC would answer CANCELLED, which means a cancellation by the caller, and which most balancers do not retry."""
    with ServerProcess(bundle) as server:
        async with channel_to(server.target) as channel:
            await InferenceServiceStub(channel).GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
            server.process.send_signal(signal.SIGTERM)
            ends = await asyncio.gather(*(_ask_until_gone(server, channel) for _ in range(64)))
    codes = {code for codes in ends for code in codes}
    assert grpc.StatusCode.UNAVAILABLE in codes
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


async def _ask_until_gone(server: ServerProcess, channel: grpc.aio.Channel) -> set[grpc.StatusCode]:
    """Make calls one after another until the server has gone; return their statuses."""
    codes = set()
    while server.process.poll() is None:
        stub: Any = InferenceServiceStub(channel)
        call = stub.GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0], options=ONE_TOKEN))
        codes.add(await call.code())
    return codes
