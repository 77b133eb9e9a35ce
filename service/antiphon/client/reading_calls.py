"""Calls of the client to encoder heads and embeddings, asynchronous and synchronous.

Embed needs a model with an encoder. The other calls need an encoder-only model with the head. Other models answer
UNIMPLEMENTED.
"""

from __future__ import annotations

from antiphon.client import async_channels, sync_channels
from antiphon.client.messages import Languages, Source, server_errors
from antiphon.client.readings import (
    Classification,
    Embedding,
    FilledMasks,
    Pooling,
    Tagging,
    as_classification,
    as_embedding,
    as_filled_masks,
    as_tagging,
    classify_request,
    embed_request,
    fill_mask_request,
)
from antiphon.client.terms import Terms
from antiphon.v1 import inference_pb2


class AsyncReadingCalls:
    """Asynchronous calls to encoder heads and embeddings."""

    _channels: async_channels.Channels
    _model: str
    _languages: Languages
    _terms: Terms

    async def embed(
        self,
        source: Source,
        *,
        pair: str | None = None,
        pooling: Pooling | None = None,
        normalize: bool = False,
        timeout_s: float | None = None,
    ) -> Embedding:
        """Return the encoder states of a source, or of a pair, pooled into one vector or without pooling.

        pooling: None: the vector that the model declares, or the mean if it declares none. Raises ServerError.
        """
        request = self._terms.ask(
            embed_request(self._model, source, pooling, self._languages, pair=pair, normalize=normalize)
        )
        with server_errors():
            return as_embedding(await self._channels.stub.Embed(request, **self._terms.call(timeout_s)))

    async def classify(
        self,
        source: Source,
        *,
        pair: str | None = None,
        top_k: int = 0,
        next_sentence: bool = False,
        timeout_s: float | None = None,
    ) -> Classification:
        """Return the top_k labels of a text or a pair, best first; 0 means all.

        next_sentence: predict whether the second text of a pair follows the first. Raises ServerError.
        """
        request = self._terms.ask(
            classify_request(self._model, source, pair=pair, top_k=top_k, next_sentence=next_sentence)
        )
        with server_errors():
            return as_classification(await self._channels.stub.Classify(request, **self._terms.call(timeout_s)))

    async def tag(self, text: str, *, timeout_s: float | None = None) -> Tagging:
        """Return the label of every token of a text, and the spans they form. Raises ServerError."""
        request = inference_pb2.TagRequest(model=self._model, text=text)
        with server_errors():
            return as_tagging(await self._channels.stub.Tag(request, **self._terms.call(timeout_s)))

    async def fill_mask(self, source: Source, *, top_k: int = 0, timeout_s: float | None = None) -> FilledMasks:
        """Return top_k tokens for every masked place; 0 means 5. Raises ServerError."""
        request = self._terms.ask(fill_mask_request(self._model, source, top_k))
        with server_errors():
            return as_filled_masks(await self._channels.stub.FillMask(request, **self._terms.call(timeout_s)))


class ReadingCalls:
    """Synchronous calls to encoder heads and embeddings."""

    _channels: sync_channels.Channels
    _model: str
    _languages: Languages
    _terms: Terms

    def embed(
        self,
        source: Source,
        *,
        pair: str | None = None,
        pooling: Pooling | None = None,
        normalize: bool = False,
        timeout_s: float | None = None,
    ) -> Embedding:
        """Return the encoder states of a source, or of a pair, pooled into one vector or without pooling.

        pooling: None: the vector that the model declares, or the mean if it declares none. Raises ServerError.
        """
        request = self._terms.ask(
            embed_request(self._model, source, pooling, self._languages, pair=pair, normalize=normalize)
        )
        with server_errors():
            return as_embedding(self._channels.stub.Embed(request, **self._terms.call(timeout_s)))

    def classify(
        self,
        source: Source,
        *,
        pair: str | None = None,
        top_k: int = 0,
        next_sentence: bool = False,
        timeout_s: float | None = None,
    ) -> Classification:
        """Return the top_k labels of a text or a pair, best first; 0 means all.

        next_sentence: predict whether the second text of a pair follows the first. Raises ServerError.
        """
        request = self._terms.ask(
            classify_request(self._model, source, pair=pair, top_k=top_k, next_sentence=next_sentence)
        )
        with server_errors():
            return as_classification(self._channels.stub.Classify(request, **self._terms.call(timeout_s)))

    def tag(self, text: str, *, timeout_s: float | None = None) -> Tagging:
        """Return the label of every token of a text, and the spans they form. Raises ServerError."""
        request = inference_pb2.TagRequest(model=self._model, text=text)
        with server_errors():
            return as_tagging(self._channels.stub.Tag(request, **self._terms.call(timeout_s)))

    def fill_mask(self, source: Source, *, top_k: int = 0, timeout_s: float | None = None) -> FilledMasks:
        """Return top_k tokens for every masked place; 0 means 5. Raises ServerError."""
        request = self._terms.ask(fill_mask_request(self._model, source, top_k))
        with server_errors():
            return as_filled_masks(self._channels.stub.FillMask(request, **self._terms.call(timeout_s)))
