"""Bearer tokens and the limits of a port: refused calls, their status, and their metrics."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from antiphon.client import AsyncClient, Connection, RetryPolicy, ServerError
from antiphon.rpc.auth import Token, owner_of, read_tokens
from antiphon.rpc.reloading import FileProblem
from antiphon.server import access
from antiphon.server.settings import ServerConfig
from antiphon.v1 import inference_pb2 as pb
from tests.serving import SOURCE, Gate, Serving, asking, details_of, refusal, serving, stub_of

ALICE, BOB = "alice's token", "bob's token"
ONCE = RetryPolicy(attempts=1)


def line_of(name: str, token: str) -> str:
    return f"{name}:{hashlib.sha256(token.encode()).hexdigest()}\n"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# who may call\n\n" + line_of("alice", ALICE) + line_of("bob", BOB))
    path.chmod(0o600)
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def test_every_token_of_the_file_is_accepted_and_names_the_caller(tokens: Path) -> None:
    async with serving(auth_tokens_file=tokens) as served:
        for token in (ALICE, BOB):
            async with AsyncClient(served.target, connection=Connection(token=token)) as client:
                await client.generate_text(SOURCE)
        # HTTP allows any case of the scheme.
        await stub_of(served).GetModel(pb.GetModelRequest(), metadata=(("authorization", f"bEARER {BOB}"),))
        await served.settled()
        assert [call.caller for call in served.ended] == ["alice", "bob", "bob"]


@pytest.mark.parametrize(
    ("metadata", "reason", "challenge"),
    [
        ((), "TOKEN_MISSING", "Bearer"),
        (bearer("nobody's token"), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        (bearer(""), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        (bearer(ALICE[:-1]), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        ((("authorization", f"Basic {ALICE}"),), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        ((("authorization", ALICE),), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        (bearer(ALICE) * 2, "TOKEN_INVALID", 'Bearer error="invalid_token"'),
        (bearer("x") + bearer(ALICE), "TOKEN_INVALID", 'Bearer error="invalid_token"'),
    ],
)
async def test_call_without_a_token_is_refused(metadata: Any, reason: str, challenge: str, tokens: Path) -> None:
    async with serving(auth_tokens_file=tokens) as served:
        for call in (
            stub_of(served).Generate(asking(), metadata=metadata),
            stub_of(served).GetModel(pb.GetModelRequest(), metadata=metadata),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert (details_of(error).reason, details_of(error).domain) == (reason, "antiphon")
            trailers = dict(error.trailing_metadata())
            assert trailers["www-authenticate"] == challenge
            assert trailers["x-request-id"]
        labels = {"model_name": "", "reason": reason}
        # Counted after the client has the status; `settled` does not wait for the gate, which counts by itself.
        async with asyncio.timeout(60):
            while served.registry.get_sample_value("antiphon_requests_refused_total", labels) != 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert served.registry.get_sample_value("antiphon_requests_refused_total", labels) == 2  # also after the end


def _methods_of_every_kind(channel: grpc.aio.Channel) -> dict[str, Any]:
    return {
        "/antiphon.v1.InferenceService/ListModels": channel.unary_unary,
        "/antiphon.v1.InferenceService/Generate": channel.unary_stream,
        "/grpc.health.v1.Health/Watch": channel.unary_stream,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": channel.stream_stream,
        "/inference.GRPCInferenceService/ModelStreamInfer": channel.stream_stream,
        "/grpc.channelz.v1.Channelz/GetServers": channel.unary_unary,
        "/no.such.Service/Method": channel.unary_unary,
    }


async def _health_of(served: Serving) -> int:
    make: Any = served.channel.unary_unary(
        "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
    )
    return int((await make(b"")).status)


async def test_every_method_except_the_health_check_requires_a_token(tokens: Path) -> None:
    async with serving(auth_tokens_file=tokens) as served:
        assert await _health_of(served) == health_pb2.HealthCheckResponse.SERVING
        for method, make in _methods_of_every_kind(served.channel).items():
            # Streams of requests are opened, and nothing is sent: a refusal that waits for a message never comes.
            call = make(method)() if make == served.channel.stream_stream else make(method)(b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else call.read())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
    known = served.registry.get_sample_value(
        "antiphon_grpc_server_handled_total", {"method": "(unauthenticated)", "code": "UNAUTHENTICATED"}
    )
    assert known == len(_methods_of_every_kind(served.channel))


async def test_reflection_answers_a_client_with_a_token(tokens: Path) -> None:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with serving(auth_tokens_file=tokens) as served:
        make: Any = served.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = make(ask(), metadata=bearer(ALICE))
        answer = await call.read()
        assert "antiphon.v1.InferenceService" in {each.name for each in answer.list_services_response.service}
        call.cancel()


def put(path: Path, text: str | None) -> None:
    """Write a file; None removes it."""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)


async def test_tokens_are_read_again_when_the_file_changes(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(auth_tokens_file=tokens) as served:

        async def code_of(token: str) -> grpc.StatusCode:
            try:
                await stub_of(served).GetModel(pb.GetModelRequest(), metadata=bearer(token))
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        ok, refused = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
        assert (await code_of(ALICE), await code_of("new")) == (ok, refused)
        put(tokens, line_of("alice", "new"))
        assert (await code_of(ALICE), await code_of("new")) == (refused, ok)
        put(tokens, line_of("alice", "newest") + "bob:bob's token\n")  # not a digest
        assert (await code_of("newest"), await code_of("new")) == (refused, ok)
        put(tokens, None)
        assert await code_of("new") == ok
        put(tokens, "# nobody\n")
        assert await code_of("new") == refused
        counted = {
            result: served.registry.get_sample_value("antiphon_token_reloads_total", {"result": result})
            for result in ("ok", "failed")
        }
    assert counted == {"ok": 2, "failed": 2}
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "line 2 is not NAME:SHA256" in logged
    assert not [secret for secret in ("bob's token", "newest") if secret in logged]


@pytest.mark.parametrize(
    "line",
    ["alice", "alice:", "alice:secret", ":" + "0" * 64, "alice:" + "0" * 63, "alice:" + "g" * 64, "a b:" + "0" * 64],
)
def test_line_that_is_not_a_token_is_refused_by_its_number_and_not_quoted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# the first line\n" + line + "\n")
    with pytest.raises(FileProblem) as caught:
        read_tokens("auth_tokens_file", path)
    assert str(caught.value) == f"auth_tokens_file is {path}, whose line 2 is not NAME:SHA256 with 64 hex digits"


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


@given(st.dictionaries(st.text(min_size=1), names, max_size=8), st.text())
def test_owner_of_a_token_is_the_name_of_its_entry(owners: dict[str, str], stranger: str) -> None:
    held = [
        Token(name, hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest())
        for token, name in owners.items()
        if _can_travel(token)
    ]
    for token, name in owners.items():
        if _can_travel(token):
            assert owner_of(token, held) == name
    if stranger not in owners and _can_travel(stranger):
        assert owner_of(stranger, held) is None


def _can_travel(token: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in token)


def test_every_entry_is_compared_with_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[bytes] = []
    genuine = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    held = [Token(f"n{i}", hashlib.sha256(str(i).encode()).digest()) for i in range(5)]
    for presented in ("0", "4", "nobody's"):
        compared.clear()
        owner_of(presented, held)
        assert compared == [token.digest for token in held]


async def test_proxy_names_the_caller_only_when_it_is_trusted(tokens: Path) -> None:
    named = (("x-client", "tenant-1"),)
    async with serving(caller_metadata_key="x-client", auth_tokens_file=tokens) as served:
        stub = stub_of(served)
        await stub.GetModel(pb.GetModelRequest(), metadata=bearer(ALICE) + named)
        await stub.GetModel(pb.GetModelRequest(), metadata=(*bearer(ALICE), ("x-client", "a b")))
        await refusal(stub.GetModel(pb.GetModelRequest(), metadata=named))
        await served.settled()
        assert [call.caller for call in served.ended][:2] == ["tenant-1", "alice"]
    async with serving() as served:
        await stub_of(served).GetModel(pb.GetModelRequest(), metadata=named)
        await served.settled()
        assert [call.caller for call in served.ended] == ["ipv4:127.0.0.1"]


async def test_calls_beyond_the_limit_are_refused_with_pushback_and_health_is_not() -> None:
    gates: list[Gate] = []
    async with serving(prepare=lambda runner: gates.append(Gate(runner)), max_concurrent_rpcs=1) as served:
        stub = stub_of(served)
        running = asyncio.ensure_future(_text_of(stub.Generate(asking())))
        await asyncio.to_thread(gates[0].reached.wait)
        error = await refusal(stub.Generate(asking()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error).reason == "TOO_MANY_RPCS"
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        assert await _health_of(served) == health_pb2.HealthCheckResponse.SERVING
        gates[0].open()
        await running
        for _ in range(3):  # the count is zero again
            await stub.GetModel(pb.GetModelRequest())


async def test_calls_beyond_the_streams_of_a_connection_wait_at_the_client() -> None:
    gates: list[Gate] = []
    async with serving(prepare=lambda runner: gates.append(Gate(runner)), max_concurrent_streams=1) as served:
        stub = stub_of(served)
        running = asyncio.ensure_future(_text_of(stub.Generate(asking())))
        await asyncio.to_thread(gates[0].reached.wait)
        error = await refusal(stub.GetModel(pb.GetModelRequest(), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.ensure_future(stub.GetModel(pb.GetModelRequest()))
        gates[0].open()
        await running
        await waiting
    assert [call.method.rpartition("/")[2] for call in served.ended] == ["Generate", "GetModel"]


async def test_metadata_beyond_the_limit_is_refused() -> None:
    async with serving(max_metadata_bytes=2048) as served:
        stub = stub_of(served)
        await stub.GetModel(pb.GetModelRequest(), metadata=(("x", "a" * 1000),))
        error = await refusal(stub.GetModel(pb.GetModelRequest(), metadata=(("x", "a" * 2048),)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_response_beyond_the_limit_is_not_sent() -> None:
    async with serving(max_response_bytes=1024) as served:
        text = "the cat " * 400
        error = await refusal(stub_of(served).Tokenize(pb.TokenizeRequest(text=text)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await stub_of(served).Tokenize(pb.TokenizeRequest(text="the cat"))).token_ids) > 0


async def test_connections_beyond_the_limit_are_closed() -> None:
    def connect(served: Serving) -> AsyncClient:
        # Different metadata prevent gRPC from sharing one connection between clients.
        return AsyncClient(served.target, connection=Connection(retry=ONCE, keepalive_s=10.0 + len(clients)))

    clients: list[AsyncClient] = []
    async with serving(max_connections=2) as served:
        for _ in range(2):
            clients.append(connect(served))
            await clients[-1].get_model()
        clients.append(connect(served))
        with pytest.raises(ServerError) as caught:
            await clients[-1].get_model()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        await clients[0].get_model()
        for client in clients:
            await client.close()


async def test_old_connection_is_closed_and_its_calls_continue() -> None:
    gates: list[Gate] = []
    async with serving(prepare=lambda runner: gates.append(Gate(runner)), max_connection_age_s=1.0) as served:
        stub = stub_of(served)
        running = asyncio.ensure_future(_text_of(stub.Generate(asking())))
        await asyncio.to_thread(gates[0].reached.wait)
        await served.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)  # the server has sent GOAWAY
        gates[0].open()
        assert await running == await _text_of(stub.Generate(asking())) != ""


async def test_grace_of_an_old_connection_ends_its_calls() -> None:
    gates: list[Gate] = []
    ages: dict[str, Any] = {"max_connection_age_s": 1.0, "max_connection_age_grace_s": 1.0}
    async with serving(prepare=lambda runner: gates.append(Gate(runner)), **ages) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _text_of(stub_of(served).Generate(asking()))
        gates[0].open()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_idle_connection_is_closed_and_opened_again_with_the_next_call() -> None:
    async with serving(max_connection_idle_s=1.0) as served:
        await stub_of(served).GetModel(pb.GetModelRequest())
        await served.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        await stub_of(served).GetModel(pb.GetModelRequest())


async def _text_of(call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]) -> str:
    return "".join([response.text_delta async for response in call])


CA_AND_PAIR: dict[str, Any] = {"tls_cert": Path("c"), "tls_key": Path("k")}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"auth_tokens_file": Path("t")}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["port listens on 0.0.0.0, and every client that reaches it may call"]),
        ({"host": "10.1.2.3", **CA_AND_PAIR}, ["port listens on 10.1.2.3, and every client that reaches it may call"]),
        ({"host": "::", **CA_AND_PAIR, "tls_client_ca": Path("a")}, []),
        ({"host": "0.0.0.0", **CA_AND_PAIR, "auth_tokens_file": Path("t")}, []),
        ({"host": "0.0.0.0", "auth_tokens_file": Path("t")}, ["port listens on 0.0.0.0 without TLS, so tokens can"]),
        ({"metrics_host": "0.0.0.0"}, ["metrics_port listens on 0.0.0.0, and every client that reaches it may read"]),
        ({"admin_host": "0.0.0.0"}, []),
        ({"admin_host": "0.0.0.0", "admin_port": 1}, ["admin_port listens on 0.0.0.0, and every client that"]),
    ],
)
def test_ports_without_access_control_cause_a_warning(settings: dict[str, Any], expected: list[str]) -> None:
    found = list(access.warnings_of(ServerConfig(**settings)))
    assert [bool(re.match(re.escape(start), one)) for start, one in zip(expected, found, strict=True)] == [True] * len(
        expected
    )


def test_token_file_that_others_can_read_causes_a_warning(tokens: Path) -> None:
    assert not list(access.warnings_of(ServerConfig(auth_tokens_file=tokens)))
    tokens.chmod(0o644)
    (warning,) = access.warnings_of(ServerConfig(auth_tokens_file=tokens))
    assert str(tokens) in warning


def test_ports_listen_on_loopback_by_default() -> None:
    config = ServerConfig()
    hosts = (config.host, config.metrics_host, config.admin_host, config.probe_host)
    assert [access.is_loopback(host) for host in hosts] == [True] * 4
