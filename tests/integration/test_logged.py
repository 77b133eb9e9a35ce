"""Log of the real process: one line for every RPC, and no text of a client."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.client import AsyncClient, Options, ServerError
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.process import ANTIPHON, ServerProcess, environment, is_idle

SECRET = "Rumpelstilzchen"
_SERVICE = "antiphon.v1.InferenceService"
OWN_ID = (("x-request-id", "mine"),)


def requests() -> list[tuple[str, Any]]:
    """Make every RPC with the secret in all of its texts, in valid and invalid requests."""
    sourced: dict[str, Any] = {
        "Generate": pb.GenerateRequest, "GenerateUnary": pb.GenerateUnaryRequest, "Score": pb.ScoreRequest,
        "Embed": pb.EmbedRequest, "Classify": pb.ClassifyRequest, "FillMask": pb.FillMaskRequest,
        "Explain": pb.ExplainRequest, "NextToken": pb.NextTokenRequest, "Tokenize": pb.TokenizeRequest,
        "Tag": pb.TagRequest,
    }  # fmt: skip
    asked: list[tuple[str, Any]] = []
    for method, kind in sourced.items():
        good = kind(text=SECRET, **({"target_text": SECRET} if method in ("Score", "Explain") else {}))
        asked += [(method, good), (method, kind(text=SECRET * 500)), (method, kind(model=SECRET, text=SECRET))]
        asked.append((method, good.SerializeToString()[:-1]))
        asked.append((method, good.SerializeToString().replace(b"stilz", b"\xff\xffilz")))
    for options in ({"prefix_text": SECRET}, {"stop_strings": [SECRET]}, {"stop_strings": [SECRET] * 99}):
        asked.append(("GenerateUnary", pb.GenerateUnaryRequest(text=SECRET, options=pb.GenerateOptions(**options))))
    asked.append(("Generate", pb.GenerateRequest(text=SECRET, source_language=SECRET, target_language=SECRET)))
    asked.append(("GetPositions", pb.GetPositionsRequest(model=SECRET)))
    return [*asked, ("GetModel", pb.GetModelRequest(model=SECRET)), ("ListModels", SECRET.encode())]


async def ask(channel: grpc.aio.Channel, method: str, message: Any) -> str:
    """Send one request, read the answer to its end and return the status."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    kind: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = kind(f"/{_SERVICE}/{method}")(data, metadata=OWN_ID, timeout=60)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method == "Generate":
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    return str((await call.code()).name)


async def ask_all(server: ServerProcess, asked: list[tuple[str, Any]]) -> list[str]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        return await asyncio.gather(*(ask(channel, method, message) for method, message in asked))


async def ended(server: ServerProcess) -> tuple[int, str]:
    """Stop the server; return its exit code and its output after the first line."""
    server.process.send_signal(signal.SIGTERM)
    code, errors = await asyncio.to_thread(server.finish)
    return code, server.output + errors


@pytest.mark.parametrize("kind", ["json", "text"])
async def test_texts_of_clients_are_never_logged(bundle: Path, kind: str) -> None:
    asked = requests()
    with ServerProcess(bundle, ["--log-level", "debug", "--log-format", kind]) as server:
        codes = await ask_all(server, [*asked, (SECRET, b"")])
        code, written = await ended(server)
    assert code == 0
    assert {*codes} == {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
    for part in (SECRET, "stilz", "Rumpel"):
        assert part not in server.ready_line + written
    assert written.count("antiphon.observability.access_log") == len(asked) + 1  # and the unknown method


def access_lines(written: str) -> list[dict[str, Any]]:
    """Return the access lines among lines of JSON, which must all be objects."""
    lines = [json.loads(line) for line in written.splitlines()]
    return [line for line in lines if line["message"] == "rpc"]


async def test_access_lines_agree_with_the_answers_to_the_client(bundle: Path) -> None:
    with ServerProcess(bundle, ["--log-format", "json"]) as server:
        answer, refused = await _answered_refused_and_cancelled(server)
        await asyncio.to_thread(server.wait_for_metrics, is_idle)
        _, written = await ended(server)
    ok, bad, cancelled = access_lines(written)
    assert (ok["method"], ok["model"], ok["request_id"]) == (f"{_SERVICE}/GenerateUnary", server.model, "mine")
    assert (ok["source_tokens"], ok["generated_tokens"]) == (answer.usage.source_tokens, answer.usage.generated_tokens)
    assert (ok["status"], ok["finish_reasons"]) == ("OK", "length")
    assert 0 <= ok["queue_ms"] <= ok["ttft_ms"] <= ok["total_ms"]
    assert (bad["status"], bad["reason"], bad["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "options.temperature")
    assert bad["request_id"] == refused.request_id
    assert (cancelled["status"], cancelled["cancel_cause"]) == ("CANCELLED", "client")
    assert (cancelled["generated_tokens"] >= 1, cancelled["finish_reasons"]) == (True, "cancelled")


async def _answered_refused_and_cancelled(server: ServerProcess) -> tuple[pb.GenerateUnaryResponse, ServerError]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = InferenceServiceStub(channel)
        options = pb.GenerateOptions(max_new_tokens=5)
        answer = await stub.GenerateUnary(pb.GenerateUnaryRequest(text="a", options=options), metadata=OWN_ID)
    async with AsyncClient(server.target) as client:
        with pytest.raises(ServerError) as caught:
            await client.generate_text("a", Options(temperature=-1))
        stream = client.generate("a", Options(max_new_tokens=2000))
        await anext(stream)
        await stream.aclose()
    return answer, caught.value


@pytest.mark.combinations
async def test_access_log_can_be_limited_to_errors(bundle: Path) -> None:
    with ServerProcess(bundle, ["--log-format", "json", "--access-log", "errors"]) as server:
        await ask_all(server, [("ListModels", b""), ("GetModel", pb.GetModelRequest(model="other"))])
        _, written = await ended(server)
    assert [line["status"] for line in access_lines(written)] == ["NOT_FOUND"]


@contextlib.contextmanager
def unheard(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server whose standard error is an unread pipe."""
    read_end, write_end = os.pipe()
    command = [*ANTIPHON, "serve", "--port", "0", "--metrics-port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write_end, text=True, env=environment()) as process:
        os.close(write_end)
        try:
            yield process
        finally:
            process.kill()
            os.close(read_end)


async def fill_the_log(process: subprocess.Popen[str]) -> None:
    """Make a server write three times the capacity of its pipe."""
    assert process.stdout is not None
    ready = await asyncio.to_thread(process.stdout.readline)
    async with grpc.aio.insecure_channel(ready.partition(" on ")[2].partition(",")[0]) as channel:
        own_id = (("x-request-id", "x" * 128),)
        stub: Any = InferenceServiceStub(channel)
        for _ in range(8):
            calls = [stub.ListModels(pb.ListModelsRequest(), metadata=own_id, timeout=60) for _ in range(100)]
            await asyncio.gather(*calls)


@pytest.mark.combinations
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_lines_that_standard_error_refuses_are_counted_and_calls_continue(bundle: Path) -> None:
    with ServerProcess(bundle, prefix=("sh", "-c", 'exec "$@" 2>/dev/full', "sh")) as server:
        async with AsyncClient(server.target) as client:
            for _ in range(3):
                await client.list_models()
        server.wait_for_metrics(lambda metrics: metrics["antiphon_log_lines_dropped_total"] >= 3)
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == (0, "")


@pytest.mark.combinations
async def test_unread_log_pipe_blocks_neither_calls_nor_the_shutdown() -> None:
    with unheard() as process:
        await fill_the_log(process)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.combinations
async def test_unread_log_pipe_does_not_delay_a_second_signal() -> None:
    with unheard("--drain-delay-s", "3600") as process:
        await fill_the_log(process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) in (128 + signal.SIGINT, 128 + signal.SIGTERM)
