"""A small typed client of antiphon.v1, asynchronous and synchronous. Imports grpcio and protobuf only.

    with Client() as client:
        for delta in client.generate("How are you?"):
            print(delta.text, end="")

Knows nothing of models: texts and options go out, deltas come back, refusals become ServerError.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from copy import copy
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from antiphon.messages import (
    Delta,
    FinishReason,
    Generation,
    Judgement,
    Languages,
    ServerError,
    Source,
    Timing,
    TokenLogprob,
    Usage,
    as_delta,
    as_generations,
    as_judgement,
    as_server_error,
    explain_request,
    score_request,
    server_errors,
    stream_request,
    unary_request,
)
from antiphon.options import EarlyStopping, Options
from antiphon.ordered import ordered_map
from antiphon.reading_calls import AsyncReadingCalls, ReadingCalls
from antiphon.readings import Classification, Embedding, FilledMasks, Pooling, Tagging
from antiphon.v1 import inference_pb2, inference_pb2_grpc

__all__ = [
    "DEFAULT_TARGET",
    "AsyncClient",
    "Classification",
    "Client",
    "Delta",
    "EarlyStopping",
    "Embedding",
    "FilledMasks",
    "FinishReason",
    "Generation",
    "Judgement",
    "Options",
    "Pooling",
    "ServerError",
    "Source",
    "Tagging",
    "Timing",
    "TokenLogprob",
    "Usage",
]

DEFAULT_TARGET = "127.0.0.1:50051"

# Refusals before anything was generated; the server's pushback, where it gives one, replaces the backoff (gRFC A6).
_RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
}
_SERVICE_CONFIG = json.dumps(
    {"methodConfig": [{"name": [{"service": "antiphon.v1.InferenceService"}], "retryPolicy": _RETRY_POLICY}]}
)


class AsyncClient(AsyncReadingCalls):
    """Calls a server from one event loop, all calls over one connection. Close it, or use it as a context."""

    def __init__(
        self, target: str = DEFAULT_TARGET, *, model: str = "", source_language: str = "", target_language: str = ""
    ) -> None:
        """target: host:port. model: name to ask for; empty is the server's default, its first.

        source_language, target_language: of every call, as `get_model` lists them; empty takes the model's default.
        """
        self._channel = grpc.aio.insecure_channel(target, options=_channel_options(target))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = model
        self._languages = Languages(source=source_language, target=target_language)

    def with_languages(self, source_language: str = "", target_language: str = "") -> Self:
        """This client for other languages, over the same connection: close one of them only."""
        other = copy(self)
        other._languages = Languages(source=source_language, target=target_language)
        return other

    async def generate(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[Delta]:
        """Stream the targets of one source. Leaving the iteration cancels the work. Raises ServerError."""
        call = self._stub.Generate(stream_request(self._model, source, options, self._languages), timeout=timeout_s)
        try:
            with server_errors():
                async for response in call:
                    yield as_delta(response)
        finally:
            call.cancel()

    async def generate_text(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> Generation:
        """Return the whole target of one source: the best where there are several. Raises ServerError."""
        return (await self.generate_outputs(source, options, timeout_s=timeout_s))[0]

    async def generate_outputs(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> list[Generation]:
        """Return every target of one source, the best first where beams were searched. Raises ServerError."""
        request = unary_request(self._model, source, options, self._languages)
        with server_errors():
            return as_generations(await self._stub.GenerateUnary(request, timeout=timeout_s))

    async def generate_many(
        self,
        sources: Iterable[Source] | AsyncIterable[Source],
        options: Options | None = None,
        *,
        concurrency: int = 64,
    ) -> AsyncIterator[Generation | ServerError]:
        """Yield the target of each source, in their order, with at most `concurrency` under way.

        A source that the server refuses yields its ServerError, so that its neighbours are not lost. Sources are read
        lazily; a synchronous iterable must not block.
        """

        async def attempt(source: Source) -> Generation | ServerError:
            try:
                return await self.generate_text(source, options)
            except ServerError as error:
                return error

        async for result in ordered_map(_as_async(sources), attempt, concurrency=concurrency):
            yield result

    async def score(
        self, source: Source, target: Source, *, num_alternatives: int = 0, timeout_s: float | None = None
    ) -> Judgement:
        """Return the log-probability of each token of a target, end token included. Raises ServerError."""
        request = score_request(self._model, source, target, num_alternatives, self._languages)
        with server_errors():
            return as_judgement(await self._stub.Score(request, timeout=timeout_s))

    async def explain(
        self, source: Source, target: Source | None = None, *, timeout_s: float | None = None
    ) -> inference_pb2.ExplainResponse:
        """Return the attention maps of a source and a target, or of the greedy answer. Raises ServerError."""
        with server_errors():
            return await self._stub.Explain(
                explain_request(self._model, source, target, self._languages), timeout=timeout_s
            )

    async def get_model(self) -> inference_pb2.Model:
        """Describe the model. Raises ServerError."""
        with server_errors():
            return (await self._stub.GetModel(inference_pb2.GetModelRequest(model=self._model))).model

    async def list_models(self) -> list[inference_pb2.Model]:
        """Describe every model of the server, its default first. Raises ServerError."""
        with server_errors():
            return list((await self._stub.ListModels(inference_pb2.ListModelsRequest())).models)

    async def close(self) -> None:
        """Cancel what is under way and close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Client(ReadingCalls):
    """Calls a server from any thread, all calls over one connection. Close it, or use it as a context."""

    def __init__(
        self, target: str = DEFAULT_TARGET, *, model: str = "", source_language: str = "", target_language: str = ""
    ) -> None:
        """target: host:port. model: name to ask for; empty is the server's default, its first.

        source_language, target_language: of every call, as `get_model` lists them; empty takes the model's default.
        """
        self._channel = grpc.insecure_channel(target, options=_channel_options(target))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._model = model
        self._languages = Languages(source=source_language, target=target_language)

    def with_languages(self, source_language: str = "", target_language: str = "") -> Self:
        """This client for other languages, over the same connection: close one of them only."""
        other = copy(self)
        other._languages = Languages(source=source_language, target=target_language)
        return other

    def generate(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> Iterator[Delta]:
        """Stream the targets of one source. Leaving the iteration cancels the work. Raises ServerError."""
        call = self._stub.Generate(stream_request(self._model, source, options, self._languages), timeout=timeout_s)
        try:
            with server_errors():
                for response in call:
                    yield as_delta(response)
        finally:
            call.cancel()

    def generate_text(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> Generation:
        """Return the whole target of one source: the best where there are several. Raises ServerError."""
        return (self.generate_outputs(source, options, timeout_s=timeout_s))[0]

    def generate_outputs(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> list[Generation]:
        """Return every target of one source, the best first where beams were searched. Raises ServerError."""
        request = unary_request(self._model, source, options, self._languages)
        with server_errors():
            return as_generations(self._stub.GenerateUnary(request, timeout=timeout_s))

    def generate_many(
        self, sources: Iterable[Source], options: Options | None = None, *, concurrency: int = 64
    ) -> Iterator[Generation | ServerError]:
        """Yield the target of each source, in their order, with at most `concurrency` under way.

        A source that the server refuses yields its ServerError, so that its neighbours are not lost.
        """
        under_way: deque[grpc.Future[inference_pb2.GenerateUnaryResponse]] = deque()
        try:
            for source in sources:
                under_way.append(
                    self._stub.GenerateUnary.future(unary_request(self._model, source, options, self._languages))
                )
                if len(under_way) == concurrency:
                    yield _outcome(under_way.popleft())
            while under_way:
                yield _outcome(under_way.popleft())
        finally:
            for call in under_way:
                call.cancel()

    def score(
        self, source: Source, target: Source, *, num_alternatives: int = 0, timeout_s: float | None = None
    ) -> Judgement:
        """Return the log-probability of each token of a target, end token included. Raises ServerError."""
        request = score_request(self._model, source, target, num_alternatives, self._languages)
        with server_errors():
            return as_judgement(self._stub.Score(request, timeout=timeout_s))

    def explain(
        self, source: Source, target: Source | None = None, *, timeout_s: float | None = None
    ) -> inference_pb2.ExplainResponse:
        """Return the attention maps of a source and a target, or of the greedy answer. Raises ServerError."""
        with server_errors():
            return self._stub.Explain(explain_request(self._model, source, target, self._languages), timeout=timeout_s)

    def get_model(self) -> inference_pb2.Model:
        """Describe the model. Raises ServerError."""
        with server_errors():
            return self._stub.GetModel(inference_pb2.GetModelRequest(model=self._model)).model

    def list_models(self) -> list[inference_pb2.Model]:
        """Describe every model of the server, its default first. Raises ServerError."""
        with server_errors():
            return list(self._stub.ListModels(inference_pb2.ListModelsRequest()).models)

    def close(self) -> None:
        """Cancel what is under way and close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _outcome(call: grpc.Future[inference_pb2.GenerateUnaryResponse]) -> Generation | ServerError:
    try:
        return as_generations(call.result())[0]
    except grpc.RpcError as error:
        return as_server_error(error)


def _channel_options(target: str) -> list[tuple[str, str | int]]:
    loopback = target.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
    # A proxy from the environment cannot reach this machine's loopback.
    return [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.enable_http_proxy", 0 if loopback else 1),
        ("grpc.max_receive_message_length", -1),  # attention maps outgrow gRPC's 4 MiB
    ]


async def _as_async(sources: Iterable[Source] | AsyncIterable[Source]) -> AsyncIterator[Source]:
    if isinstance(sources, AsyncIterable):
        async for source in sources:
            yield source
    else:
        for source in sources:
            yield source
