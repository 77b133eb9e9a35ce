"""Calls of the client about single tokens, asynchronous and synchronous: tokenise, detokenise, next token.

NextToken needs a model with a decoder, on a processor. Other models answer UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.client import async_channels, sync_channels
from antiphon.client.messages import Languages, Source, server_errors
from antiphon.client.options import Options
from antiphon.client.terms import Terms
from antiphon.client.tokens import (
    Detokenization,
    NextToken,
    Tokenization,
    as_detokenization,
    as_next_token,
    as_tokenization,
    next_token_request,
)
from antiphon.v1 import inference_pb2


class AsyncTokenCalls:
    """Asynchronous calls about single tokens."""

    _channels: async_channels.Channels
    _model: str
    _languages: Languages
    _terms: Terms

    async def next_token(
        self,
        source: Source,
        options: Options | None = None,
        *,
        generated_ids: Sequence[int] = (),
        num_tokens: int = 20,
        timeout_s: float | None = None,
    ) -> NextToken:
        """Return the distribution of the token after generated_ids, before and after every control that changes it.

        num_tokens: number of most likely tokens to report, at most 1,000. Raises ServerError.
        """
        request = self._terms.ask(
            next_token_request(
                self._model,
                source,
                options,
                self._languages,
                generated_ids=generated_ids,
                num_tokens=num_tokens,
            )
        )
        with server_errors():
            return as_next_token(await self._channels.stub.NextToken(request, **self._terms.call(timeout_s)))

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> Tokenization:
        """Return the token ids that the model reads for a text, without special tokens. Raises ServerError."""
        request = inference_pb2.TokenizeRequest(model=self._model, text=text)
        with server_errors():
            return as_tokenization(await self._channels.stub.Tokenize(request, **self._terms.call(timeout_s)))

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> Detokenization:
        """Return the text of target tokens, and the piece of each. Raises ServerError."""
        request = inference_pb2.DetokenizeRequest(model=self._model, token_ids=token_ids)
        with server_errors():
            return as_detokenization(await self._channels.stub.Detokenize(request, **self._terms.call(timeout_s)))


class TokenCalls:
    """Synchronous calls about single tokens."""

    _channels: sync_channels.Channels
    _model: str
    _languages: Languages
    _terms: Terms

    def next_token(
        self,
        source: Source,
        options: Options | None = None,
        *,
        generated_ids: Sequence[int] = (),
        num_tokens: int = 20,
        timeout_s: float | None = None,
    ) -> NextToken:
        """Return the distribution of the token after generated_ids, before and after every control that changes it.

        num_tokens: number of most likely tokens to report, at most 1,000. Raises ServerError.
        """
        request = self._terms.ask(
            next_token_request(
                self._model,
                source,
                options,
                self._languages,
                generated_ids=generated_ids,
                num_tokens=num_tokens,
            )
        )
        with server_errors():
            return as_next_token(self._channels.stub.NextToken(request, **self._terms.call(timeout_s)))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> Tokenization:
        """Return the token ids that the model reads for a text, without special tokens. Raises ServerError."""
        request = inference_pb2.TokenizeRequest(model=self._model, text=text)
        with server_errors():
            return as_tokenization(self._channels.stub.Tokenize(request, **self._terms.call(timeout_s)))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> Detokenization:
        """Return the text of target tokens, and the piece of each. Raises ServerError."""
        request = inference_pb2.DetokenizeRequest(model=self._model, token_ids=token_ids)
        with server_errors():
            return as_detokenization(self._channels.stub.Detokenize(request, **self._terms.call(timeout_s)))
