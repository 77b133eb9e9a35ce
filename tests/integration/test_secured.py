"""A server with mutual TLS, tokens, https and a separate probe port; the command line sends the requests."""

import hashlib
import json
import signal
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.certificates import Authority
from tests.integration.process import PATIENCE_S, ServerProcess, antiphon

TOKEN, ADMIN_TOKEN = "a token of nobody else", "another"


@dataclass(frozen=True, kw_only=True, slots=True)
class Secured:
    """Run the server; yield it and the flags of an admitted client."""

    process: ServerProcess
    folder: Path
    flags: tuple[str, ...]
    authority: Authority


def _tokens(folder: Path, name: str, token: str) -> Path:
    (folder / f"{name}.token").write_text(token + "\n")
    path = folder / f"{name}.tokens"
    path.write_text(f"{name}:{hashlib.sha256(token.encode()).hexdigest()}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def secured(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder)
    pair, client = authority.server(), authority.client("someone")
    arguments = (
        f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={authority.file}", "--metrics-tls=true",
        f"--auth-tokens-file={_tokens(folder, 'alice', TOKEN)}", "--admin-port=0", "--probe-port=0",
        f"--admin-tokens-file={_tokens(folder, 'operator', ADMIN_TOKEN)}",
    )  # fmt: skip
    flags = ("--tls-ca", str(authority.file), "--tls-cert", str(client.cert), "--tls-key", str(client.key))
    with ServerProcess(bundle, arguments) as process:
        yield Secured(process=process, folder=folder, flags=flags, authority=authority)
        process.process.send_signal(signal.SIGTERM)
        code, errors = process.finish()
        assert code == 0
        assert TOKEN not in errors
        assert "WARNING" not in errors


def ask(secured: Secured, *flags: str) -> tuple[int, str, str]:
    done = antiphon(
        "generate", "--target", secured.process.target, "--json", "--max-new-tokens", "3", *flags, "Eine Katze"
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_generate_is_answered_with_certificate_and_token(secured: Secured) -> None:
    token = str(secured.folder / "alice.token")
    code, answer, errors = ask(secured, *secured.flags, "--token-file", token, "--timeout", "60", "--priority", "batch")
    assert (code, errors) == (0, "")
    assert json.loads(answer)["usage"]["generated_tokens"] == 3


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("certificate", "is unavailable"),
        ("token", "the call carries no token"),
        ("admin's", "the token is not one of this server's"),
    ],
)
def test_generate_names_the_missing_credential(secured: Secured, part: str, message: str) -> None:
    flags = secured.flags[:2] if part == "certificate" else secured.flags
    if part == "admin's":
        flags = (*flags, "--token-file", str(secured.folder / "operator.token"))
    code, answer, errors = ask(secured, *flags)
    assert (code, answer) == (2, "")
    assert message in errors


@pytest.mark.parametrize(("name", "code"), [("operator", 0), ("alice", 2)])
def test_admin_port_requires_a_separate_token(secured: Secured, name: str, code: int) -> None:
    assert secured.process.admin_target is not None
    token = str(secured.folder / f"{name}.token")
    done = antiphon(
        "models", "memory", "--admin-target", secured.process.admin_target, *secured.flags, "--token-file", token
    )
    assert done.returncode == code


def test_probes_need_neither_certificate_nor_token_and_get_only_health(secured: Secured) -> None:
    with grpc.insecure_channel(secured.process.probe_target) as channel:
        check: Any = channel.unary_unary(
            "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        assert check(b"", timeout=PATIENCE_S).status == health_pb2.HealthCheckResponse.SERVING
        list_models: Any = channel.unary_unary("/antiphon.v1.InferenceService/ListModels")
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            list_models(b"", timeout=PATIENCE_S)


def test_metrics_are_served_over_the_same_tls(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.authority.file)
    client = secured.authority.client("prometheus")
    context.load_cert_chain(client.cert, client.key)
    assert secured.process.metrics_url.startswith("https://")
    with urllib.request.urlopen(secured.process.metrics_url, context=context, timeout=PATIENCE_S) as response:
        text = response.read().decode()
    assert "antiphon_tls_certificate_expiry_timestamp_seconds" in text
    assert 'reason="TOKEN_MISSING"' in text


def test_health_needs_a_certificate_on_the_main_port_and_none_on_the_probe_port(secured: Secured) -> None:
    probe = secured.process.probe_target.rpartition(":")[2]
    assert antiphon("health", "--target", secured.process.target, *secured.flags).returncode == 0
    assert antiphon("health", "--target", secured.process.target).returncode == 1
    assert antiphon("health", env={"ANTIPHON_PROBE_PORT": probe}).returncode == 0
