"""Authenticates calls: an interceptor before every service of a port that checks bearer tokens and names the caller.

A call is refused before its request is read and before any header is sent. Refusals appear in metrics and log lines.
A token file has lines of this form; only the SHA-256 of tokens is stored and compared:

    # name:sha256 of the token, in hex; a name may have several while its token is renewed
    alice:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bb822cd15d6c15b0f00a0

A leaked file reveals no token, provided that tokens are random: docs/SECURITY.md explains how to create them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from antiphon.domain.errors import TokenInvalid, Unauthenticated
from antiphon.observability.call import is_request_id
from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.client_waits import ClientWaits
from antiphon.rpc.context import enter_caller
from antiphon.rpc.endpoints import Endpoint, ServerCall, grpc_handler
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.reloading import FileProblem, Reloading, read_bytes

_MAX_FILE_BYTES = 1 << 20
_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63}):(?P<digest>[0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Token:
    """Name of a token's owner, and the SHA-256 of the token."""

    name: str
    digest: bytes


def read_tokens(setting: str, path: Path) -> tuple[Token, ...]:
    """Return the tokens of a file, which may be empty. Raises FileProblem with the line's number, not its content."""
    try:
        text = read_bytes(setting, path, _MAX_FILE_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise FileProblem(f"{setting} is {path}, which holds other characters than ASCII") from None
    tokens = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise FileProblem(f"{setting} is {path}, whose line {number} is not NAME:SHA256 with 64 hex digits")
        tokens.append(Token(match["name"], bytes.fromhex(match["digest"])))
    return tuple(tokens)


def owner_of(presented: str, tokens: Sequence[Token]) -> str | None:
    """Return the owner of a presented token; None if it is unknown. Takes the same time for every token."""
    digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
    owner = None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            owner = token.name
    return owner


# Orchestrators send probes without credentials. The answer is one enum value.
_OPEN = ("/grpc.health.v1.Health/Check",)
# All refused calls are counted under this name: clients without a token must not be able to create metric labels.
_REFUSED = "(unauthenticated)"

Metadata = Sequence[tuple[str, str | bytes]]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class Gate(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token.

    tokens: None accepts all calls. caller_key: metadata key in which a trusted proxy names the caller.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        waits: ClientWaits,
        *,
        tokens: Reloading[tuple[Token, ...]] | None,
        caller_key: str | None = None,
    ) -> None:
        self._tokens = tokens
        self._caller_key = caller_key
        self._middleware = CallMiddleware(telemetry, waits)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call, or a handler that refuses it."""
        metadata: Metadata = handler_call_details.invocation_metadata or ()
        try:
            if handler_call_details.method not in _OPEN:
                owner = self._authenticated(metadata)
                enter_caller(self._named_by_proxy(metadata) or owner)
        except Unauthenticated as error:
            return self._refusing(error)
        return await continuation(handler_call_details)

    def _authenticated(self, metadata: Metadata) -> str | None:
        """Return the name of the call's token; None if tokens are not checked. Raises Unauthenticated."""
        if self._tokens is None:
            return None
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            raise Unauthenticated("the call carries no token; send metadata authorization: Bearer TOKEN")
        scheme, _, token = str(values[0]).partition(" ")
        owner = owner_of(token.strip(), self._tokens.current()) if scheme.lower() == "bearer" else None
        if owner is None or len(values) > 1:
            raise TokenInvalid("the token is not one of this server's")
        return owner

    def _named_by_proxy(self, metadata: Metadata) -> str | None:
        name = next((value for key, value in metadata if key == self._caller_key), None)
        return name if isinstance(name, str) and is_request_id(name) else None

    def _refusing(self, error: Unauthenticated) -> grpc.RpcMethodHandler[Any, Any]:
        async def refuse(call: ServerCall) -> None:
            raise error

        # A handler of streams refuses without waiting for a request. Clients of unary methods see no difference.
        return grpc_handler(self._middleware.guard(_REFUSED, Endpoint(refuse)), is_streaming=True)
