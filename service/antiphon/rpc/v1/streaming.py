"""Submits requests to the engine and returns their events, at the pace of all streams.

Errors name the fields of the client's message. A request is cancelled if its client leaves before the end of its
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc.aio

from antiphon.domain.errors import AntiphonError, InvalidArgument, SlowReader
from antiphon.domain.request import CancelCause, Request, TokenEvent
from antiphon.engine.remote import AnyEngine
from antiphon.engine.stream import OutputStream
from antiphon.observability.call import CallRecord
from antiphon.rpc.v1.options import as_option, prefix_field
from antiphon.rpc.v1.requests import EngineMessage
from antiphon.rpc.v1.responses import Answer
from antiphon.v1 import inference_pb2 as pb


class Pacing:
    """Keeps the total rate of messages of all streams below a limit. For the event loop."""

    def __init__(self, max_messages_per_s: float) -> None:
        self._max_messages_per_s = max_messages_per_s
        self._num_streams = 0

    @property
    def window_s(self) -> float:
        """Seconds for which a new stream collects tokens for one message.

        A message costs CPU time that the models need. With few streams each token is sent at once, with many streams
        several tokens share a message.
        """
        return (self._num_streams + 1) / self._max_messages_per_s

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream until the context exits."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


@dataclass(slots=True, eq=False)
class Submitted:
    """Request that an engine has accepted: its stream, and the writer of its messages."""

    request: Request
    engine: AnyEngine
    stream: OutputStream
    answer: Answer


class Submission:
    """The way of one model's requests into its engine. For the event loop."""

    def __init__(self, engine: AnyEngine, pacing: Pacing) -> None:
        self._engine = engine
        self._pacing = pacing

    @contextlib.contextmanager
    def stream(self, message: EngineMessage, request: Request, record: CallRecord) -> Iterator[OutputStream]:
        """Submit a request and read its stream within the context. An exception inside cancels the request.

        Raises AntiphonError if the engine refuses the request.
        """
        stream = self._submit(message, request)
        with self._pacing.stream(), cancelled_on_error(self._engine, request, stream, record):
            yield stream

    async def collect(self, message: EngineMessage, request: Request, record: CallRecord) -> Sequence[TokenEvent]:
        """Submit a request and return the last events of its outputs. Raises AntiphonError if the engine refuses it."""
        stream = self._submit(message, request)
        with cancelled_on_error(self._engine, request, stream, record):
            return await stream.collect()

    def open(self, message: EngineMessage, request: Request, record: CallRecord, answer: Answer) -> Submitted:
        """Submit a request of a call that reads its stream by `listen` and `take`, and cancels it itself.

        Raises AntiphonError if the engine refuses the request.
        """
        stream = self._submit(message, request, coalesce_s=0.0)
        record.admitted(request, stream)
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
        source_field = "text" if isinstance(message, pb.TagRequest) else message.WhichOneof("source")
        return InvalidArgument(source_field or error.field, error.value, error.allowed)
    if error.field == "target" and isinstance(message, pb.ScoreRequest):
        return InvalidArgument(message.WhichOneof("target") or error.field, error.value, error.allowed)
    if isinstance(message, pb.GenerateRequest | pb.GenerateUnaryRequest):
        if error.field != "prefix":
            return as_option(error)
        return InvalidArgument(prefix_field(message.options), error.value, error.allowed)
    return error


# A client's cancellation at its deadline may arrive before the deadline that it sent: grpc rounds that up by up to 1 %.
_ROUNDING = 0.01
_CLOCKS_APART_S = 0.02


@contextlib.contextmanager
def cancelled_on_error(engine: AnyEngine, request: Request, stream: OutputStream, record: CallRecord) -> Iterator[None]:
    """Read a submitted request's stream within the context. An exception that leaves the context cancels the request.

    An AntiphonError other than SlowReader does not, since it comes from the engine, which has ended the request. The
    record of the call takes the end of the request.
    """
    record.admitted(request, stream)
    try:
        yield
    except SlowReader:
        engine.give_up(stream, CancelCause.SLOW_READER)
        raise
    except AntiphonError:
        raise
    except (asyncio.CancelledError, grpc.aio.BaseError):  # BaseError: nothing can be sent any more
        engine.give_up(stream, cancel_cause(request, engine.clock()))
        raise
    except Exception:
        engine.give_up(stream, CancelCause.FAULT)
        raise


def cancel_cause(request: Request, now_s: float) -> CancelCause:
    """Return why a client ended the call of a request now: its deadline, or its own wish."""
    return CancelCause.DEADLINE if _has_run_out(request, now_s) else CancelCause.CLIENT


def _has_run_out(request: Request, now_s: float) -> bool:
    if request.deadline_s is None:
        return False
    early_s = _ROUNDING * (request.deadline_s - request.arrival_s) + _CLOCKS_APART_S
    return now_s >= request.deadline_s - early_s
