"""Asynchronous client of antiphon.v1.InferenceService."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self

from antiphon.client.async_channels import Channels
from antiphon.client.async_many import Conversation
from antiphon.client.connection import Connection
from antiphon.client.many import DEFAULT_CONCURRENCY, ManyRequests
from antiphon.client.messages import (
    Delta,
    Generation,
    Judgement,
    Languages,
    ServerError,
    Source,
    as_delta,
    as_generations,
    as_judgement,
    explain_request,
    score_request,
    server_errors,
    stream_request,
    unary_request,
)
from antiphon.client.options import Options
from antiphon.client.ordered import ordered_map
from antiphon.client.reading_calls import AsyncReadingCalls
from antiphon.client.terms import DEFAULT_TARGET, SERVICE_NAME, Priority, Terms
from antiphon.client.token_calls import AsyncTokenCalls
from antiphon.v1 import inference_pb2


class AsyncClient(AsyncReadingCalls, AsyncTokenCalls):
    """Calls a server from one event loop, over one connection or several. Close it, or use it as a context manager."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        model: str = "",
        source_language: str = "",
        target_language: str = "",
        connection: Connection | None = None,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> None:
        """Open the connections. target: host:port, or several in gRPC's notation. model: empty is the server's first.

        source_language, target_language: of every call, as `get_model` lists them; empty takes the model's default.
        connection: encryption, credentials, retries, balancing. timeout_s: default deadline of a call, retries
        included. priority: "batch" gives interactive requests precedence. Raises ValueError.
        """
        how = connection or Connection()
        self._terms = Terms(how, timeout_s=timeout_s, priority=priority)
        self._channels = Channels(partial(how.open_async, target, SERVICE_NAME), how, self._terms)
        self._model = model
        self._languages = Languages(source=source_language, target=target_language)

    def with_model(self, model: str) -> Self:
        """Return a client for another model that shares this client's connection: close only one of them."""
        other = copy(self)
        other._model = model
        return other

    def with_languages(self, source_language: str = "", target_language: str = "") -> Self:
        """Return a client for other languages that shares this client's connection: close only one of them."""
        other = copy(self)
        other._languages = Languages(source=source_language, target=target_language)
        return other

    async def generate(
        self,
        source: Source,
        options: Options | None = None,
        *,
        report_beam_steps: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the targets of one source. Leaving the iteration cancels the request. Raises ServerError.

        report_beam_steps: the last delta has every step of the beam search.
        """
        request = self._terms.ask(
            stream_request(self._model, source, options, self._languages, report_beam_steps=report_beam_steps)
        )
        call = self._channels.stub.Generate(request, **self._terms.call(timeout_s))
        try:
            with server_errors():
                async for response in call:
                    yield as_delta(response)
        finally:
            call.cancel()

    async def generate_text(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> Generation:
        """Return the complete target of one source, the best one if there are several. Raises ServerError."""
        return (await self.generate_outputs(source, options, timeout_s=timeout_s))[0]

    async def generate_outputs(
        self,
        source: Source,
        options: Options | None = None,
        *,
        report_beam_steps: bool = False,
        timeout_s: float | None = None,
    ) -> list[Generation]:
        """Return every target of one source; with beam search the best comes first. Raises ServerError.

        report_beam_steps: the targets have every step of the beam search.
        """
        request = self._terms.ask(
            unary_request(self._model, source, options, self._languages, report_beam_steps=report_beam_steps)
        )
        with server_errors():
            return as_generations(await self._channels.stub.GenerateUnary(request, **self._terms.call(timeout_s)))

    async def generate_many(
        self,
        sources: Iterable[Source] | AsyncIterable[Source],
        options: Options | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> AsyncIterator[Generation | ServerError]:
        """Yield the target of each source, in order, with at most `concurrency` requests at a time.

        All requests share one call. An older server, and one with several addresses (load_balancing), gets a call for
        each of them. A source that the server refuses yields its ServerError, and the iteration continues. Sources are
        read lazily; a synchronous iterable must not block.
        """
        async for outcome in self.generate_outputs_many(sources, options, concurrency=concurrency):
            yield outcome if isinstance(outcome, ServerError) else outcome[0]

    async def generate_outputs_many(
        self,
        sources: Iterable[Source] | AsyncIterable[Source],
        options: Options | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> AsyncIterator[list[Generation] | ServerError]:
        """Yield every target of each source, in order, as generate_many does."""
        if (calls := await self._channels.many_calls()) is None:
            async for outcome in ordered_map(_as_async(sources), self._attempt(options), concurrency=concurrency):
                yield outcome
            return
        requests = ManyRequests(self._building(options), self._terms, concurrency=concurrency, num_calls=len(calls))
        async for outcome in Conversation(calls, _as_async(sources), requests).outcomes():
            yield outcome

    def _attempt(self, options: Options | None) -> Callable[[Source], Awaitable[list[Generation] | ServerError]]:
        async def attempt(source: Source) -> list[Generation] | ServerError:
            try:
                return await self.generate_outputs(source, options)
            except ServerError as error:
                return error

        return attempt

    def _building(self, options: Options | None) -> Callable[[Source], inference_pb2.GenerateRequest]:
        return lambda source: self._terms.ask(stream_request(self._model, source, options, self._languages))

    async def score(
        self, source: Source, target: Source, *, num_alternatives: int = 0, timeout_s: float | None = None
    ) -> Judgement:
        """Return the log-probability of each token of a target, end token included. Raises ServerError."""
        request = self._terms.ask(score_request(self._model, source, target, num_alternatives, self._languages))
        with server_errors():
            return as_judgement(await self._channels.stub.Score(request, **self._terms.call(timeout_s)))

    async def explain(
        self,
        source: Source,
        target: Source | None = None,
        *,
        pair: str | None = None,
        timeout_s: float | None = None,
    ) -> inference_pb2.ExplainResponse:
        """Return the attention maps of a source and a target, or of the greedy answer.

        Encoder-only models have no target, and read the source alone or as a pair. Raises ServerError.
        """
        request = self._terms.ask(explain_request(self._model, source, target, self._languages, pair=pair))
        with server_errors():
            return await self._channels.stub.Explain(request, **self._terms.call(timeout_s))

    async def get_positions(
        self, num_positions: int = 0, *, timeout_s: float | None = None
    ) -> list[inference_pb2.PositionEncoding]:
        """Return the representation of the first positions in each part of the model, the encoder first.

        num_positions: 0 means 64, or as many as the model has. Raises ServerError.
        """
        request = inference_pb2.GetPositionsRequest(model=self._model, num_positions=num_positions)
        with server_errors():
            response = await self._channels.stub.GetPositions(request, **self._terms.call(timeout_s))
        return list(response.encodings)

    async def get_model(self) -> inference_pb2.Model:
        """Describe the model. Raises ServerError."""
        with server_errors():
            return (
                await self._channels.stub.GetModel(
                    inference_pb2.GetModelRequest(model=self._model), **self._terms.call()
                )
            ).model

    async def list_models(self) -> list[inference_pb2.Model]:
        """Describe every model of the server, its default first. Raises ServerError."""
        with server_errors():
            return list(
                (await self._channels.stub.ListModels(inference_pb2.ListModelsRequest(), **self._terms.call())).models
            )

    async def connect(self) -> None:
        """Connect to every process of the server (--workers), so that all calls spread over them.

        `generate_many` does it by itself. Without it, and with `Connection(connections=...)`, connections are as set.
        """
        await self._channels.many_calls()

    async def close(self) -> None:
        """Cancel running calls and close the connections."""
        await self._channels.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _as_async(sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncIterator[Source]:
    if isinstance(sources, AsyncIterable):
        async for source in sources:
            yield source
    else:
        for source in sources:
            yield source
