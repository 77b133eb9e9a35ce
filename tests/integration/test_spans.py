"""Spans of the real process, as a collector receives them; none are sent if tracing is off."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.collector import Collector, attributes_of, collecting
from tests.integration.process import ServerProcess, antiphon, environment, is_idle

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ERROR, UNSET = 2, 0


def metadata(request_id: str, flags: str = "01") -> tuple[tuple[str, str], ...]:
    return (("x-request-id", request_id), ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}"))


def asking(max_new_tokens: int, **options: Any) -> dict[str, Any]:
    return {"text": "Rumpelstilzchen", "options": pb.GenerateOptions(max_new_tokens=max_new_tokens, **options)}


async def traffic(server: ServerProcess) -> dict[str, Any]:
    """Make a stream, a unary call without id, an unsampled call, a refusal and a cancelled stream; return a usage."""
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = InferenceServiceStub(channel)
        stream = stub.Generate(pb.GenerateRequest(**asking(30)), metadata=metadata("streamed"))
        messages = [message async for message in stream]
        await stub.GenerateUnary(pb.GenerateUnaryRequest(**asking(3)), metadata=(("x-request-id", "alone"),))
        await stub.GenerateUnary(pb.GenerateUnaryRequest(**asking(3)), metadata=metadata("unsampled", "00"))
        request = pb.GenerateUnaryRequest(**asking(3, temperature=-1))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GenerateUnary(request, metadata=metadata("refused"))
        cancelled = stub.Generate(pb.GenerateRequest(**asking(2000)), metadata=metadata("cancelled"))
        await cancelled.read()
        cancelled.cancel()
    await asyncio.to_thread(server.wait_for_metrics, is_idle)
    return {"usage": messages[-1].usage, "messages": len(messages)}


async def test_spans_of_a_server_agree_with_the_answers_to_its_clients(bundle: Path) -> None:
    with collecting() as collector:
        with ServerProcess(bundle, ["--otlp-endpoint", collector.endpoint]) as server:
            seen = await traffic(server)
            await asyncio.to_thread(collector.wait_for, "streamed")
            server.process.send_signal(signal.SIGTERM)
            code, errors = await asyncio.to_thread(server.finish)  # the rest is exported during shutdown
        assert (code, "Traceback" in errors) == (0, False)
        assert {*collector.rpcs} == {"streamed", "alone", "refused", "cancelled"}
        assert collector.resource["service.name"] == "antiphon"
        assert "Rumpel" not in str(collector.spans)
        _check_stream(collector, server.model, seen)
        _check_unhappy(collector)


def _check_stream(collector: Collector, model: str, seen: dict[str, Any]) -> None:
    rpc = collector.rpcs["streamed"]
    assert (rpc.trace_id.hex(), rpc.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    attributes = attributes_of(rpc)
    assert (rpc.name, attributes["rpc.service"], attributes["rpc.method"], rpc.kind) == (
        "antiphon.v1.InferenceService/Generate", "antiphon.v1.InferenceService", "Generate", 2,
    )  # fmt: skip
    assert (attributes["rpc.grpc.status_code"], attributes["gen_ai.request.model"]) == (0, model)
    parts = collector.parts(rpc)
    queue, encode, decode, stream = (parts[name] for name in ("queue", "encode", "decode", "stream"))
    assert {part.trace_id for part in parts.values()} == {rpc.trace_id}
    assert attributes_of(encode)["gen_ai.usage.input_tokens"] == seen["usage"].source_tokens
    assert attributes_of(decode)["gen_ai.usage.output_tokens"] == seen["usage"].generated_tokens
    assert attributes_of(stream)["antiphon.stream.messages"] == seen["messages"]
    (first_token,) = decode.events
    times = [
        rpc.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano, encode.end_time_unix_nano,
        first_token.time_unix_nano, decode.end_time_unix_nano, rpc.end_time_unix_nano,
    ]  # fmt: skip
    assert all(earlier <= later for earlier, later in itertools.pairwise(times))
    assert encode.start_time_unix_nano == queue.end_time_unix_nano
    assert decode.start_time_unix_nano == encode.end_time_unix_nano
    assert (stream.start_time_unix_nano, stream.end_time_unix_nano) == (
        first_token.time_unix_nano, rpc.end_time_unix_nano,
    )  # fmt: skip


def _check_unhappy(collector: Collector) -> None:
    alone, refused, cancelled = (collector.rpcs[name] for name in ("alone", "refused", "cancelled"))
    assert not alone.parent_span_id
    assert alone.trace_id.hex() != TRACE_ID
    assert {*collector.parts(alone)} == {"queue", "encode", "decode"}
    attributes = attributes_of(refused)
    assert (attributes["rpc.grpc.status_code"], attributes["error.type"]) == (3, "INVALID_FIELD")
    assert (refused.status.code, collector.parts(refused)) == (UNSET, {})  # the client caused it
    attributes = attributes_of(cancelled)
    assert (attributes["rpc.grpc.status_code"], attributes["antiphon.cancel_cause"]) == (1, "client")
    assert attributes_of(collector.parts(cancelled)["decode"])["antiphon.finish_reasons"] == "cancelled"


@pytest.mark.combinations
async def test_spans_are_dropped_and_counted_without_delay_when_no_collector_answers(bundle: Path) -> None:
    with collecting() as collector:
        gone = collector.endpoint
    with ServerProcess(bundle, ["--otlp-endpoint", gone]) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = InferenceServiceStub(channel)
            await stub.ListModels(pb.ListModelsRequest())
        server.process.send_signal(signal.SIGTERM)
        code, errors = await asyncio.to_thread(server.finish)
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.combinations
def test_server_without_the_setting_never_imports_opentelemetry() -> None:
    script = (
        "import sys, antiphon.server.process as server\n"
        "found = [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())


@pytest.mark.combinations
def test_serve_refuses_an_endpoint_when_the_extra_is_not_installed(bundle: Path, tmp_path: Path) -> None:
    package = tmp_path / "opentelemetry"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('hidden', name='opentelemetry')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    refused = antiphon("serve", str(bundle), "--otlp-endpoint", "http://127.0.0.1:1", env={"PYTHONPATH": path})
    assert refused.returncode == 2
    assert refused.stderr.decode().count("\n") == 1
    assert "otlp_endpoint" in refused.stderr.decode()
    assert "pip install 'antiphon[trace]'" in refused.stderr.decode()
