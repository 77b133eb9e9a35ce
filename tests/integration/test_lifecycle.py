"""Start-up, readiness and shutdown of the real process, and all its refusals to start."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from antiphon.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, file_entry
from antiphon.client import AsyncClient, Options
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import SENTENCES
from tests.integration.faulty_engine import HeldEngine, held_engine
from tests.integration.process import PATIENCE_S, ServerProcess, antiphon, num_submitted, terminated
from tests.manifests import edit_manifest
from tests.serving import details_of

SERVING = health_pb2.HealthCheckResponse.SERVING
ENDLESS = Options(max_new_tokens=2048)
# Enough for the first message of every stream, and far less than for the last.
NUM_FIRST_STEPS = 16


def test_serve_prints_one_ready_line_with_model_address_and_first_command(server: ServerProcess, bundle: Path) -> None:
    assert (server.model, server.precision) == (bundle.name, "int8")
    assert f'antiphon generate --target {server.target} "How are you?"' in server.ready_line


@pytest.mark.combinations
def test_serve_uses_the_configured_precision(bundle: Path) -> None:
    with ServerProcess(bundle, ["--precision", "float32"]) as server:
        assert server.precision == "float32"


async def test_health_is_serving_for_the_server_and_its_service(server: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "antiphon.v1.InferenceService", "inference.GRPCInferenceService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == SERVING


async def test_reflection_lists_every_service_and_returns_its_file(server: ServerProcess) -> None:
    expected = {
        "antiphon.v1.InferenceService",
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "xds.service.orca.v3.OpenRcaService",
    }
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    requests += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in sorted(expected)]
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        listed, *described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    assert {service.name for service in listed.list_services_response.service} == expected
    assert all(answer.file_descriptor_response.file_descriptor_proto for answer in described)


async def test_get_model_reports_limits_and_provenance(server: ServerProcess) -> None:
    async with AsyncClient(server.target) as client:
        model = await client.get_model()
    assert (model.limits.max_source_len, model.limits.max_target_len) == (256, 2048)
    assert (model.name, model.provenance.licence) == (server.model, "CC0-1.0")


async def begun(server: ServerProcess, client: AsyncClient, engine: HeldEngine, num_streams: int) -> list[Any]:
    """Return streams, each with the text of its first message; none ends before the engine is released."""
    streams = [client.generate(SENTENCES[0], ENDLESS) for _ in range(num_streams)]
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.to_thread(server.wait_for_metrics, lambda now: num_submitted(now) == num_streams)
    engine.allow(NUM_FIRST_STEPS)
    return [(stream, first.text) for stream, first in zip(streams, await asyncio.gather(*firsts), strict=True)]


async def _whole(stream: Any, text: str) -> str:
    return text + "".join([delta.text async for delta in stream])


async def test_sigterm_finishes_the_running_stream_refuses_new_ones_and_exits_zero(
    server: ServerProcess, bundle: Path, tmp_path: Path
) -> None:
    async with AsyncClient(server.target) as client:
        expected = await client.generate_text(SENTENCES[0], ENDLESS)
    no_retries = [("grpc.enable_retries", 0)]
    with held_engine(tmp_path) as engine, ServerProcess(bundle, prefix=engine.prefix) as leaving:
        async with (
            grpc.aio.insecure_channel(leaving.target, options=no_retries) as channel,
            AsyncClient(leaving.target) as client,
        ):
            streams = await begun(leaving, client, engine, 8)
            await terminated(leaving, channel)
            refused = await _refused_while_draining(channel)
            engine.release()
            texts = await asyncio.gather(*(_whole(stream, first) for stream, first in streams))
        code, errors = await asyncio.to_thread(leaving.finish)
    assert set(texts) == {expected.text}
    assert (refused.code(), details_of(refused).reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
    assert (code, "Traceback" in errors) == (0, False)


async def _refused_while_draining(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(inference_pb2.GenerateUnaryRequest(text=SENTENCES[1]), timeout=PATIENCE_S)
    return caught.value


@pytest.mark.combinations
async def test_drain_ends_remaining_requests_after_its_grace(bundle: Path, tmp_path: Path) -> None:
    flags = ["--drain-grace-s", "0"]
    with held_engine(tmp_path) as engine, ServerProcess(bundle, flags, prefix=engine.prefix) as server:
        async with AsyncClient(server.target) as client:
            streams = await begun(server, client, engine, 8)
            server.process.send_signal(signal.SIGTERM)
            engine.release()  # a step that never ends would be a hang, which has another exit code
            results = await asyncio.gather(
                *(_whole(stream, first) for stream, first in streams), return_exceptions=True
            )
        code, _ = await asyncio.to_thread(server.finish)
    assert {getattr(result, "code", None) for result in results} == {grpc.StatusCode.UNAVAILABLE}
    assert code == 0


@pytest.mark.combinations
async def test_second_signal_ends_the_process_at_once(bundle: Path, tmp_path: Path) -> None:
    with held_engine(tmp_path) as engine, ServerProcess(bundle, prefix=engine.prefix) as server:
        async with grpc.aio.insecure_channel(server.target) as channel, AsyncClient(server.target) as client:
            streams = await begun(server, client, engine, 32)
            await terminated(server, channel, signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)
            code, _ = await asyncio.to_thread(server.finish)
            for stream, _ in streams:
                await stream.aclose()
    assert code == 128 + signal.SIGTERM


@pytest.mark.combinations
def test_serve_names_a_port_in_use_and_the_first_server_continues(server: ServerProcess, bundle: Path) -> None:
    for flags, port in (
        (["--port", str(server.port), "--metrics-port", "0"], server.port),
        (["--port", "0", "--metrics-port", str(server.metrics_port)], server.metrics_port),
    ):
        result = antiphon("serve", str(bundle), *flags)
        assert result.returncode == 2
        line = one_line(result)
        assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in line
    assert server.metrics()


def one_line(result: subprocess.CompletedProcess[bytes]) -> str:
    """Return the only line on standard error; standard output must be empty."""
    assert result.stdout == b""
    (line,) = result.stderr.decode().splitlines()
    return line


def _flip_a_byte(copy: Path) -> None:
    weights = copy / "weights.native.int8.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def _flip_a_bit_of_the_template(copy: Path) -> None:
    """Change the id of the end token, which only the manifest's checksum detects."""
    whole = (copy / MANIFEST_NAME).read_bytes()
    damaged = whole.replace(b'"$text",\n      2\n', b'"$text",\n      3\n')
    assert damaged != whole
    (copy / MANIFEST_NAME).write_bytes(damaged)


def _replace_tokenizer(copy: Path) -> None:
    Tokenizer.train(SENTENCES, vocab_size=300).save(copy / "tokenizer.json")
    entry = file_entry(copy / "tokenizer.json").model_dump()
    edit_manifest(copy, lambda manifest: manifest["files"].update({"tokenizer.json": entry}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (_flip_a_byte, "weights.native.int8.bin is damaged"),
    "missing file": (lambda copy: (copy / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "newer": (
        lambda copy: edit_manifest(copy, lambda manifest: manifest.update(format_version=FORMAT_VERSION + 1)),
        f"format_version is {FORMAT_VERSION + 1}; this Antiphon reads {FORMAT_VERSION}: export",
    ),
    "bad field": (
        lambda copy: edit_manifest(copy, lambda manifest: manifest["model"].update(num_heads=0)),
        "model.num_heads",
    ),
    "bad token": (
        lambda copy: edit_manifest(copy, lambda manifest: manifest["text"].update(template=["$text", 70000])),
        "manifest.json: text.template is 70000; it must be from 0 to ",
    ),
    "heads that the graphs do not have": (
        lambda copy: edit_manifest(copy, lambda manifest: manifest["model"].update(num_heads=2)),
        "the encoder graph failed: ",
    ),
    "flipped bit of the manifest": (_flip_a_bit_of_the_template, "manifest.json is damaged"),
    "no manifest": (lambda copy: (copy / MANIFEST_NAME).unlink(), "is not a bundle"),
    "broken manifest": (lambda copy: (copy / MANIFEST_NAME).write_bytes(b"\xff{"), "manifest.json cannot be read"),
    "wrong vocabulary": (_replace_tokenizer, "tokenizer.json: vocab_size is 300; the model's is "),
    "no graphs of the precision": (
        lambda copy: edit_manifest(
            copy, lambda manifest: manifest.update(graphs=[g for g in manifest["graphs"] if g["precision"] != "int8"])
        ),
        "precision int8",
    ),
}


@pytest.mark.combinations
@pytest.mark.parametrize("damage", DAMAGES)
def test_serve_names_file_or_field_when_the_bundle_is_unusable(bundle: Path, tmp_path: Path, damage: str) -> None:
    spoil, message = DAMAGES[damage]
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    spoil(copy)
    result = antiphon("serve", str(copy), "--port", "0", "--metrics-port", "0", "--precision", "int8")
    assert result.returncode == 2
    assert message in one_line(result)
    assert str(copy) in one_line(result)


@pytest.mark.combinations
def test_print_config_shows_flags_over_environment_over_toml(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text('port = 1\nmetrics_port = 1\nmax_num_seqs = 8\nlog_level = "debug"\n')
    result = antiphon(
        "serve", "--print-config", "--config", str(file), "--port", "3",
        env={"ANTIPHON_PORT": "2", "ANTIPHON_METRICS_PORT": "2"},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    printed = tomllib.loads(result.stdout.decode())
    assert (printed["port"], printed["metrics_port"], printed["max_num_seqs"]) == (3, 2, 8)
    file.write_bytes(result.stdout)
    assert antiphon("serve", "--print-config", "--config", str(file)).stdout == result.stdout


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        (["--port", "99999"], {}, "port (from --port) is '99999'; it must be a whole number from 0 to 65535"),
        ([], {"ANTIPHON_MAX_NUM_SEQS": "lots"}, "max_num_seqs (from ANTIPHON_MAX_NUM_SEQS) is 'lots'"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml cannot be read"),
        (["--host", "192.0.2.1"], {}, "192.0.2.1"),  # not an address of this machine
        (["--kv-cache-blocks", "143"], {}, "kv_cache_blocks is 143; it must be at least 144"),
    ],
)
def test_serve_stops_with_the_fields_name_when_a_setting_is_wrong(
    bundle: Path, flags: list[str], env: dict[str, str], message: str
) -> None:
    result = antiphon("serve", str(bundle), "--port", "0", "--metrics-port", "0", *flags, env=env)
    assert result.returncode == 2
    assert message in one_line(result)


@pytest.mark.combinations
def test_command_reports_that_standard_output_is_closed() -> None:
    code = "import sys; sys.stdout = None; from antiphon.cli.main import main; sys.exit(main(['generate', 'x']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "antiphon: standard output is closed\n")


def test_server_never_imports_torch() -> None:
    code = "import sys, antiphon.server.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "onnx", "onnxscript", "transformers"}.isdisjoint(loaded)


@pytest.mark.combinations
def test_port_is_free_again_when_the_server_has_ended(bundle: Path) -> None:
    with ServerProcess(bundle) as server:
        port = server.port
        server.process.send_signal(signal.SIGTERM)
        assert server.finish()[0] == 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
