"""Checks of a server before the load: it answers, it generates, and how it counts tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from antiphon.client.connection import SERVICE_NAME
from antiphon.client.messages import server_errors
from antiphon.client.options import CallOptions
from antiphon.load.plan import Plan, PlanError
from antiphon.load.workload import EVERYDAY, Entry
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub


class Probe:
    """Connection for requests before the load. Use it as a context manager. Methods raise ServerError."""

    def __init__(self, plan: Plan) -> None:
        """Open the connection. Raises ValueError for settings that cannot be used."""
        self._call_options = CallOptions(plan.connection, timeout_s=plan.timeout_s)
        self._channel = plan.connection.open(plan.target, SERVICE_NAME)
        self._stub = InferenceServiceStub(self._channel)
        self._model = plan.model

    def model(self) -> pb.Model:
        """Return the model's description. Raises PlanError if it cannot generate."""
        request = pb.GetModelRequest(model=self._model)
        with server_errors():
            model = self._stub.GetModel(request, **self._call_options.arguments()).model
        if model.architecture == pb.ARCHITECTURE_ENCODER:
            raise PlanError(f"--model: {model.name} is an encoder-only model; load needs a model that generates")
        return model

    def sources(self, entries: Sequence[Entry]) -> list[str | tuple[int, ...]]:
        """Return the sources of a trace's entries: their text, or everyday words with the entry's number of tokens.

        A source has at least one token besides those that the server adds. Every call returns the same sources.
        """
        if all(entry.source_tokens is None for entry in entries):
            return [entry.text or "" for entry in entries]
        sentences = [self._tokenize(text) for text in EVERYDAY]
        num_added = self._num_added(sentences[0])
        return [
            entry.text or ""
            if entry.source_tokens is None
            else _words(sentences, index, max(entry.source_tokens - num_added, 1))
            for index, entry in enumerate(entries)
        ]

    def _tokenize(self, text: str) -> list[int]:
        request = pb.TokenizeRequest(model=self._model, text=text)
        with server_errors():
            return list(self._stub.Tokenize(request, **self._call_options.arguments()).token_ids)

    def _num_added(self, ids: Sequence[int]) -> int:
        """Return the number of tokens that the server adds to a source, from the usage that it reports."""
        options = pb.GenerateOptions(max_new_tokens=1)
        request = pb.GenerateUnaryRequest(model=self._model, token_ids=pb.TokenIds(ids=ids), options=options)
        with server_errors():
            usage = self._stub.GenerateUnary(request, **self._call_options.arguments()).usage
        return usage.source_tokens - len(ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()


def _words(sentences: Sequence[Sequence[int]], first: int, length: int) -> tuple[int, ...]:
    """Return `length` token ids of the sentences, repeated in a cycle that begins with sentence `first`."""
    turned = itertools.islice(itertools.cycle(sentences), first % len(sentences), None)
    return tuple(itertools.islice(itertools.chain.from_iterable(turned), length))
