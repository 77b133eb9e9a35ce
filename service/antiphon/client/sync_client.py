"""Synchronous client of antiphon.v1.InferenceService."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self

import grpc

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
    as_server_error,
    explain_request,
    score_request,
    server_errors,
    stream_request,
    unary_request,
)
from antiphon.client.options import Options
from antiphon.client.reading_calls import ReadingCalls
from antiphon.client.sync_channels import Channels
from antiphon.client.sync_many import outcomes
from antiphon.client.terms import DEFAULT_TARGET, SERVICE_NAME, Priority, Terms
from antiphon.client.token_calls import TokenCalls
from antiphon.v1 import inference_pb2


class Client(ReadingCalls, TokenCalls):
    """Calls a server from any thread, over one connection. Close it, or use it as a context manager."""

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
        """Open the connection. target: host:port, or several in gRPC's notation. model: empty is the server's first.

        source_language, target_language: of every call, as `get_model` lists them; empty takes the model's default.
        connection: encryption, credentials, retries, balancing. timeout_s: default deadline of a call, retries
        included. priority: "batch" gives interactive requests precedence. Raises ValueError.
        """
        how = connection or Connection()
        self._terms = Terms(how, timeout_s=timeout_s, priority=priority)
        self._channels = Channels(partial(how.open, target, SERVICE_NAME), how, self._terms)
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

    def generate(
        self,
        source: Source,
        options: Options | None = None,
        *,
        report_beam_steps: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Delta]:
        """Stream the targets of one source. Leaving the iteration cancels the request. Raises ServerError.

        report_beam_steps: the last delta has every step of the beam search.
        """
        request = self._terms.ask(
            stream_request(self._model, source, options, self._languages, report_beam_steps=report_beam_steps)
        )
        call = self._channels.stub.Generate(request, **self._terms.call(timeout_s))
        try:
            with server_errors():
                for response in call:
                    yield as_delta(response)
        finally:
            call.cancel()

    def generate_text(
        self, source: Source, options: Options | None = None, *, timeout_s: float | None = None
    ) -> Generation:
        """Return the complete target of one source, the best one if there are several. Raises ServerError."""
        return (self.generate_outputs(source, options, timeout_s=timeout_s))[0]

    def generate_outputs(
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
            return as_generations(self._channels.stub.GenerateUnary(request, **self._terms.call(timeout_s)))

    def generate_many(
        self, sources: Iterable[Source], options: Options | None = None, *, concurrency: int = DEFAULT_CONCURRENCY
    ) -> Iterator[Generation | ServerError]:
        """Yield the target of each source, in order, with at most `concurrency` requests at a time.

        All requests share one call. An older server, and one with several addresses (load_balancing), gets a call for
        each of them. A source that the server refuses yields its ServerError, and the iteration continues.
        """
        if (calls := self._channels.many_calls()) is None:
            yield from self._generate_each(sources, options, concurrency)
            return
        requests = ManyRequests(self._building(options), self._terms, concurrency=concurrency, num_calls=len(calls))
        for outcome in outcomes(calls, sources, requests):
            yield outcome if isinstance(outcome, ServerError) else outcome[0]

    def _building(self, options: Options | None) -> Callable[[Source], inference_pb2.GenerateRequest]:
        return lambda source: self._terms.ask(stream_request(self._model, source, options, self._languages))

    def _generate_each(
        self, sources: Iterable[Source], options: Options | None, concurrency: int
    ) -> Iterator[Generation | ServerError]:
        """Yield the targets as generate_many does, with a call for each source."""
        under_way: deque[grpc.Future[inference_pb2.GenerateUnaryResponse]] = deque()
        try:
            for source in sources:
                under_way.append(
                    self._channels.stub.GenerateUnary.future(
                        self._terms.ask(unary_request(self._model, source, options, self._languages)),
                        **self._terms.call(),
                    )
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
        request = self._terms.ask(score_request(self._model, source, target, num_alternatives, self._languages))
        with server_errors():
            return as_judgement(self._channels.stub.Score(request, **self._terms.call(timeout_s)))

    def explain(
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
            return self._channels.stub.Explain(request, **self._terms.call(timeout_s))

    def get_positions(
        self, num_positions: int = 0, *, timeout_s: float | None = None
    ) -> list[inference_pb2.PositionEncoding]:
        """Return the representation of the first positions in each part of the model, the encoder first.

        num_positions: 0 means 64, or as many as the model has. Raises ServerError.
        """
        request = inference_pb2.GetPositionsRequest(model=self._model, num_positions=num_positions)
        with server_errors():
            response = self._channels.stub.GetPositions(request, **self._terms.call(timeout_s))
        return list(response.encodings)

    def get_model(self) -> inference_pb2.Model:
        """Describe the model. Raises ServerError."""
        with server_errors():
            return self._channels.stub.GetModel(
                inference_pb2.GetModelRequest(model=self._model), **self._terms.call()
            ).model

    def list_models(self) -> list[inference_pb2.Model]:
        """Describe every model of the server, its default first. Raises ServerError."""
        with server_errors():
            return list(self._channels.stub.ListModels(inference_pb2.ListModelsRequest(), **self._terms.call()).models)

    def connect(self) -> None:
        """Connect to every process of the server (--workers), so that all calls spread over them.

        `generate_many` does it by itself. Without it, and with `Connection(connections=...)`, connections are as set.
        """
        self._channels.many_calls()

    def close(self) -> None:
        """Cancel running calls and close the connection."""
        self._channels.close()

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
