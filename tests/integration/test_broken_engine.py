"""A real process whose model hangs or fails. The fault is injected at the runner; the rest is the real server."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.conftest import SENTENCES
from tests.integration.faulty_engine import faulty
from tests.integration.process import ServerProcess
from tests.serving import details_of

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NO_RETRIES = [("grpc.enable_retries", 0)]


async def test_liveness_fails_while_a_step_does_not_end(bundle: Path) -> None:
    prefix = faulty("threading.Event().wait()")
    with ServerProcess(bundle, ["--watchdog-timeout-s", "0.5"], prefix=prefix) as server:
        async with grpc.aio.insecure_channel(server.target, options=NO_RETRIES) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "liveness")]
            assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
            call = InferenceServiceStub(channel).GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
            assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 2
            metrics = await asyncio.to_thread(server.metrics)
            assert metrics["antiphon_engine_stuck"] == 1
            assert metrics["antiphon_engine_last_step_age_seconds"] > 0.5
            for number in (signal.SIGTERM, signal.SIGINT):  # one of two equal signals can be lost
                server.process.send_signal(number)
            code, errors = await asyncio.to_thread(server.finish)
            call.cancel()
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # whichever signal came second
    assert errors.count("CRITICAL") == 1
    assert "in faulty" in errors  # where the thread is


async def test_process_exits_when_its_model_is_broken_and_every_call_receives_an_error(bundle: Path) -> None:
    with ServerProcess(bundle, prefix=faulty('raise RuntimeError("secret detail")')) as server:
        async with grpc.aio.insecure_channel(server.target, options=NO_RETRIES) as channel:
            stub: Any = InferenceServiceStub(channel)
            errors: list[grpc.aio.AioRpcError] = []
            while not errors or errors[-1].code() is grpc.StatusCode.INTERNAL:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GenerateUnary(pb.GenerateUnaryRequest(text=SENTENCES[0]))
                errors.append(caught.value)
        code, log = await asyncio.to_thread(server.finish)
    assert {details_of(error).reason for error in errors[:-1]} == {"ENGINE_FAULT"}
    assert errors[-1].code() is grpc.StatusCode.UNAVAILABLE
    assert not any("secret" in (error.details() or "") for error in errors)
    assert (code, "the thread of an engine has ended" in log) == (1, True)
