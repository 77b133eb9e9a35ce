"""Synchronous client of antiphon.v1.InferenceService, and its connections.

Generated from `_async.py`, which is the file to change: `python -m tests.unit.client.unasync` writes this one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self

import grpc

from antiphon.client.analysis import (
    Classification,
    Detokenization,
    Embedding,
    FilledMasks,
    NextToken,
    Pooling,
    Tagging,
    Tokenization,
    as_classification,
    as_detokenization,
    as_embedding,
    as_filled_masks,
    as_next_token,
    as_tagging,
    as_tokenization,
    classify_request,
    embed_request,
    fill_mask_request,
    next_token_request,
)
from antiphon.client.connection import DEFAULT_TARGET, SERVICE_NAME, Connection, Placement
from antiphon.client.many import DEFAULT_CONCURRENCY, ManyRequests
from antiphon.client.many_threads import (
    OpenCall,
    UnaryCall,
    ask_offer,
    many_outcomes,
    open_many,
    open_unary,
    unary_outcomes,
)
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
from antiphon.client.options import CallOptions, Options, Priority
from antiphon.v1 import inference_pb2, inference_pb2_grpc


class Client:
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
        connection = connection or Connection()
        self._call_options = CallOptions(connection, timeout_s=timeout_s, priority=priority)
        open_channel = partial(connection.open, target, SERVICE_NAME)
        self._channels = _Channels(open_channel, connection, self._call_options)
        self._model = model
        self._languages = Languages(source=source_language, target=target_language)

    def with_model(self, model: str) -> Self:
        """Return a client for another model that shares this client's connection: close one of the two only."""
        client = copy(self)
        client._model = model
        return client

    def with_languages(self, source_language: str = "", target_language: str = "") -> Self:
        """Return a client for other languages that shares this client's connection: close one of the two only."""
        client = copy(self)
        client._languages = Languages(source=source_language, target=target_language)
        return client

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
        request = self._call_options.set_priority(
            stream_request(self._model, source, options, self._languages, report_beam_steps=report_beam_steps)
        )
        call = self._channels.stub.Generate(request, **self._call_options.arguments(timeout_s))
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
        request = self._call_options.set_priority(
            unary_request(self._model, source, options, self._languages, report_beam_steps=report_beam_steps)
        )
        with server_errors():
            return as_generations(self._channels.stub.GenerateUnary(request, **self._call_options.arguments(timeout_s)))

    def generate_many(
        self,
        sources: Iterable[Source],
        options: Options | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> Iterator[Generation | ServerError]:
        """Yield the target of each source, in order, with at most `concurrency` requests at a time.

        All requests share one call. An older server, and one with several addresses (load_balancing), gets a call for
        each of them. A source that the server refuses yields its ServerError, and the iteration continues.
        """
        for outcome in self._generate_outputs_many(sources, options, concurrency=concurrency):
            yield outcome if isinstance(outcome, ServerError) else outcome[0]

    def _generate_outputs_many(
        self,
        sources: Iterable[Source],
        options: Options | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
    ) -> Iterator[list[Generation] | ServerError]:
        """Yield every target of each source, in order, as generate_many does."""

        def open_call(source: Source) -> UnaryCall:
            request = unary_request(self._model, source, options, self._languages)
            return open_unary(self._channels.stub, self._call_options.set_priority(request), self._call_options)

        def build(source: Source) -> inference_pb2.GenerateRequest:
            return self._call_options.set_priority(stream_request(self._model, source, options, self._languages))

        if (calls := self._channels.many_calls()) is None:
            outcomes = unary_outcomes(open_call, sources, concurrency=concurrency)
        else:
            requests = ManyRequests(build, self._call_options, concurrency=concurrency, num_calls=len(calls))
            outcomes = many_outcomes(calls, sources, requests)
        yield from outcomes

    def score(
        self, source: Source, target: Source, *, num_alternatives: int = 0, timeout_s: float | None = None
    ) -> Judgement:
        """Return the log-probability of each token of a target, end token included. Raises ServerError."""
        request = self._call_options.set_priority(
            score_request(self._model, source, target, num_alternatives, self._languages)
        )
        with server_errors():
            return as_judgement(self._channels.stub.Score(request, **self._call_options.arguments(timeout_s)))

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
        request = self._call_options.set_priority(
            explain_request(self._model, source, target, self._languages, pair=pair)
        )
        with server_errors():
            return self._channels.stub.Explain(request, **self._call_options.arguments(timeout_s))

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
        request = self._call_options.set_priority(
            embed_request(self._model, source, pooling, self._languages, pair=pair, normalize=normalize)
        )
        with server_errors():
            return as_embedding(self._channels.stub.Embed(request, **self._call_options.arguments(timeout_s)))

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
        request = self._call_options.set_priority(
            classify_request(self._model, source, pair=pair, top_k=top_k, next_sentence=next_sentence)
        )
        with server_errors():
            return as_classification(self._channels.stub.Classify(request, **self._call_options.arguments(timeout_s)))

    def tag(self, text: str, *, timeout_s: float | None = None) -> Tagging:
        """Return the label of every token of a text, and the spans they form. Raises ServerError."""
        request = inference_pb2.TagRequest(model=self._model, text=text)
        with server_errors():
            return as_tagging(self._channels.stub.Tag(request, **self._call_options.arguments(timeout_s)))

    def fill_mask(self, source: Source, *, top_k: int = 0, timeout_s: float | None = None) -> FilledMasks:
        """Return top_k tokens for every masked place; 0 means 5. Raises ServerError."""
        request = self._call_options.set_priority(fill_mask_request(self._model, source, top_k))
        with server_errors():
            return as_filled_masks(self._channels.stub.FillMask(request, **self._call_options.arguments(timeout_s)))

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
        request = self._call_options.set_priority(
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
            return as_next_token(self._channels.stub.NextToken(request, **self._call_options.arguments(timeout_s)))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> Tokenization:
        """Return the token ids that the model reads for a text, without special tokens. Raises ServerError."""
        request = inference_pb2.TokenizeRequest(model=self._model, text=text)
        with server_errors():
            return as_tokenization(self._channels.stub.Tokenize(request, **self._call_options.arguments(timeout_s)))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> Detokenization:
        """Return the text of target tokens, and the piece of each. Raises ServerError."""
        request = inference_pb2.DetokenizeRequest(model=self._model, token_ids=token_ids)
        with server_errors():
            return as_detokenization(self._channels.stub.Detokenize(request, **self._call_options.arguments(timeout_s)))

    def get_positions(
        self, num_positions: int = 0, *, timeout_s: float | None = None
    ) -> list[inference_pb2.PositionEncoding]:
        """Return the representation of the first positions in each part of the model, the encoder first.

        num_positions: 0 means 64, or as many as the model has. Raises ServerError.
        """
        request = inference_pb2.GetPositionsRequest(model=self._model, num_positions=num_positions)
        with server_errors():
            response = self._channels.stub.GetPositions(request, **self._call_options.arguments(timeout_s))
        return list(response.encodings)

    def get_model(self) -> inference_pb2.Model:
        """Describe the model. Raises ServerError."""
        request = inference_pb2.GetModelRequest(model=self._model)
        with server_errors():
            response = self._channels.stub.GetModel(request, **self._call_options.arguments())
        return response.model

    def list_models(self) -> list[inference_pb2.Model]:
        """Describe every model of the server, its default first. Raises ServerError."""
        request = inference_pb2.ListModelsRequest()
        with server_errors():
            response = self._channels.stub.ListModels(request, **self._call_options.arguments())
        return list(response.models)

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


class _Channels:
    """Connections as `Connection.connections` says. Thread-safe.

    open_channel: opens a channel; with is_shared=False, one with a connection of its own.
    """

    def __init__(
        self, open_channel: Callable[..., grpc.Channel], connection: Connection, call_options: CallOptions
    ) -> None:
        self._open_channel = open_channel
        self._call_options = call_options
        self._is_spread = connection.load_balancing != "pick_first"
        self._is_placed = connection.connections is not None
        self._is_many_known: bool | None = None
        self._offer_lock = threading.Lock()
        num_opened = connection.connections or 1
        self._channels: list[grpc.Channel] = []
        self._stubs: list[inference_pb2_grpc.InferenceServiceStub] = []
        self._turns = itertools.count()
        for _ in range(num_opened):
            self._add(open_channel(is_shared=num_opened == 1))

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        """Stub of the connection whose turn it is."""
        return self._stubs[next(self._turns) % len(self._stubs)]

    def many_calls(self) -> list[OpenCall] | None:
        """Return a function for each connection that opens a GenerateMany call; None if requests need single calls.

        Single calls are for an older server, and for several addresses, among which calls are spread. The server is
        asked until it answers; if it cannot be reached, the requests will say so.
        """
        with self._offer_lock:
            if not self._is_spread and self._is_many_known is None:
                self._connect_to_processes()
        if self._is_spread or self._is_many_known is False:
            return None
        return [partial(open_many, stub, self._call_options) for stub in self._stubs]

    def close(self) -> None:
        """Cancel running calls and close the connection."""
        for channel in self._channels:
            channel.close()

    def _connect_to_processes(self) -> None:
        """Ask whether the server knows GenerateMany; if it has several processes, connect to each."""
        first = ask_offer(self._stubs[0], self._call_options)
        self._is_many_known = first.is_known
        if self._is_placed or not first.is_known:
            return
        placement = Placement(first)
        while placement.wants_more():
            channel = self._open_channel(is_shared=False)
            if placement.keeps(ask_offer(inference_pb2_grpc.InferenceServiceStub(channel), self._call_options)):
                self._add(channel)
            else:
                channel.close()

    def _add(self, channel: grpc.Channel) -> None:
        self._channels.append(channel)
        self._stubs.append(inference_pb2_grpc.InferenceServiceStub(channel))
