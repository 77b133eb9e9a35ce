"""Pieces of token ids, asked of the server once for each id."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from antiphon.client import AsyncClient, ServerError


class Pieces:
    """Pieces of one model's vocabulary, as far as they were needed. A piece is a token's own text."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[int, str] = {}

    async def of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the piece of each id. Raises ServerError."""
        wanted = set(token_ids)
        missing = sorted(wanted - self._known.keys())
        if missing:
            pieces = (await self._client.detokenize(missing)).pieces
            if len(pieces) != len(missing):
                raise ServerError(grpc.StatusCode.UNIMPLEMENTED, "the server is older than this page: it has no pieces")
            self._known.update(zip(missing, pieces, strict=True))
        return {token_id: self._known[token_id] for token_id in wanted}
