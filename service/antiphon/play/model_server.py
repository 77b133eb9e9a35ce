"""The Antiphon server behind the page: clients of its models, pieces of their tokens, its metrics and its caches."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from antiphon.client import AdminClient, AsyncClient, Connection, ServerError
from antiphon.play.messages import ModelBody
from antiphon.v1 import admin_pb2, inference_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Addresses:
    """Ports of one server."""

    target: str
    """host:port of gRPC."""
    metrics_url: str
    """URL of /metrics."""
    admin_target: str | None = None
    """host:port of the admin service; without it the page shows numbers of cache blocks, but not their holders."""


class ModelServer:
    """Connection to the server. For one event loop; use it as an asynchronous context manager."""

    def __init__(self, addresses: Addresses, connection: Connection, admin_connection: Connection) -> None:
        """connection, admin_connection: encryption and credentials of the ports. Raises ValueError."""
        self.addresses = addresses
        self.metrics_context = _tls_context(connection) if addresses.metrics_url.startswith("https:") else None
        self._client = AsyncClient(addresses.target, connection=connection)
        self._admin = None
        if addresses.admin_target is not None:
            self._admin = AdminClient(addresses.admin_target, connection=admin_connection)
        self._models: list[inference_pb2.Model] = []
        self._pieces: dict[str, Pieces] = {}

    async def models(self) -> list[inference_pb2.Model]:
        """Describe every model, the default first. Raises ServerError."""
        models = await self._client.list_models()
        if models != self._models:  # another model may have the name of one that was unloaded
            self._models = models
            self._pieces.clear()
        return models

    def client(self, body: ModelBody) -> AsyncClient:
        """Return the client of the model and languages of a request."""
        return self._client.with_model(body.model).with_languages(body.source_language, body.target_language)

    def client_of(self, model: str) -> AsyncClient:
        """Return the client of a model."""
        return self._client.with_model(model)

    def pieces(self, model: str) -> Pieces:
        """Return the pieces of a model's tokens."""
        pieces = self._pieces.get(model)
        if pieces is None:
            pieces = self._pieces[model] = Pieces(self.client_of(model))
        return pieces

    async def caches(self) -> list[admin_pb2.CacheUse] | None:
        """Return the holders of each model's cache blocks; None without an admin service. Raises ServerError."""
        if self._admin is None:
            return None
        answer = await asyncio.to_thread(self._admin.get_cache)
        return list(answer.caches)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()
        if self._admin is not None:
            self._admin.close()


def _tls_context(connection: Connection) -> ssl.SSLContext:
    """Return the settings of TLS for the metrics port, which has the certificates of the gRPC port."""
    try:
        context = ssl.create_default_context(cafile=connection.tls_ca)
        if connection.tls_cert is not None:
            context.load_cert_chain(connection.tls_cert, connection.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the files of TLS cannot be used for --metrics-url: {error}") from None
    return context


class Pieces:
    """Pieces of one model's vocabulary, as far as they were needed. A piece is a token's own text."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[int, str] = {}

    async def of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the piece of each id. Raises ServerError."""
        ids = set(token_ids)
        missing = sorted(ids - self._known.keys())
        if missing:
            pieces = (await self._client.detokenize(missing)).pieces
            if len(pieces) != len(missing):
                raise ServerError(grpc.StatusCode.UNIMPLEMENTED, "the server is older than this page: it has no pieces")
            self._known.update(zip(missing, pieces, strict=True))
        return {token_id: self._known[token_id] for token_id in ids}
