"""Submits requests to the engine and returns their events. Errors name the fields of the client's message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import Request, TokenEvent
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.call import current_call
from antiphon.rpc.v1.answers.answers import Answer
from antiphon.rpc.v1.answers.pacing import Pacing
from antiphon.rpc.v1.answers.reading import reading
from antiphon.rpc.v1.requests.arrivals import EngineMessage
from antiphon.rpc.v1.requests.options import as_option, prefix_field
from antiphon.v1 import inference_pb2 as pb


@dataclass(slots=True, eq=False)
class Submitted:
    """Request that an engine has accepted: its stream, and the writer of its messages."""

    request: Request
    engine: Engine
    stream: OutputStream
    answer: Answer


class Submission:
    """The way of one model's requests into its engine. For the event loop."""

    def __init__(self, engine: Engine, pacing: Pacing) -> None:
        self._engine = engine
        self._pacing = pacing

    @contextlib.contextmanager
    def stream(self, message: EngineMessage, request: Request) -> Iterator[OutputStream]:
        """Submit a request and read its stream within the context. An exception inside cancels the request.

        Raises AntiphonError if the engine refuses the request.
        """
        stream = self._submit(message, request)
        with self._pacing.stream(), reading(self._engine, request, stream):
            yield stream

    async def collect(self, message: EngineMessage, request: Request) -> Sequence[TokenEvent]:
        """Submit a request and return the last events of its outputs. Raises AntiphonError if the engine refuses it."""
        stream = self._submit(message, request)
        with reading(self._engine, request, stream):
            return await stream.collect()

    def open(self, message: EngineMessage, request: Request, answer: Answer) -> Submitted:
        """Submit a request of a call that reads its stream by `listen` and `take`, and cancels it itself.

        Raises AntiphonError if the engine refuses the request.
        """
        stream = self._submit(message, request, coalesce_s=0.0)
        if (call := current_call()) is not None:
            call.admitted(request, stream)
        return Submitted(request, self._engine, stream, answer)

    def _submit(self, message: EngineMessage, request: Request, coalesce_s: float | None = None) -> OutputStream:
        window_s = self._pacing.window_s if coalesce_s is None else coalesce_s
        stream = OutputStream(request.request_id, coalesce_s=window_s)
        try:
            self._engine.submit(request, stream)
        except InvalidArgument as error:
            raise _with_field_of(message, error) from None
        return stream


def _with_field_of(message: EngineMessage, error: InvalidArgument) -> InvalidArgument:
    """Return the engine's error with the name of the message's field."""
    if error.field == "source":
        given = "text" if isinstance(message, pb.TagRequest) else message.WhichOneof("source")
        return InvalidArgument(given or error.field, error.value, error.allowed)
    if error.field == "target" and isinstance(message, pb.ScoreRequest):
        return InvalidArgument(message.WhichOneof("target") or error.field, error.value, error.allowed)
    if isinstance(message, pb.GenerateRequest | pb.GenerateUnaryRequest):
        if error.field != "prefix":
            return as_option(error)
        return InvalidArgument(prefix_field(message.options), error.value, error.allowed)
    return error
