"""Carries many requests for one thread: over GenerateMany calls, or with a call for each source."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc

from antiphon.client.connection import Offer, offer_of
from antiphon.client.many import END_PATIENCE_S, ManyRequests, Outcome, early_end, pack
from antiphon.client.messages import ServerError, Source, as_generations, as_server_error
from antiphon.client.options import CallOptions
from antiphon.v1 import inference_pb2
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub

OpenCall = Callable[[Iterator[inference_pb2.GenerateManyRequest]], Any]
"""Opens a GenerateMany call that sends the messages of an iterator."""

UnaryCall: TypeAlias = "grpc.Future[inference_pb2.GenerateUnaryResponse]"

_Inbox = queue.SimpleQueue[tuple[int, int, inference_pb2.GenerateManyResponse | ServerError]]


def ask_offer(stub: InferenceServiceStub, call_options: CallOptions) -> Offer:
    """Send a GenerateMany call without requests, and return the answer."""
    call: Any = stub.GenerateMany(iter(()), **call_options.arguments())
    return offer_of(call.code(), call.trailing_metadata())


def open_many(
    stub: InferenceServiceStub, call_options: CallOptions, messages: Iterator[inference_pb2.GenerateManyRequest]
) -> Any:
    """Open a GenerateMany call without a deadline."""
    return stub.GenerateMany(messages, **call_options.arguments(math.inf))


def open_unary(
    stub: InferenceServiceStub, request: inference_pb2.GenerateUnaryRequest, call_options: CallOptions
) -> UnaryCall:
    """Send a request for complete targets; the answer is awaited later."""
    return stub.GenerateUnary.future(request, **call_options.arguments())


def many_outcomes(
    open_calls: Sequence[OpenCall], sources: Iterable[Source], requests: ManyRequests
) -> Iterator[Outcome]:
    """Yield the outcome of each source, in order. Leaving the iteration cancels what is unanswered.

    open_calls: each opens a call over a connection of its own. Sources are read while the next outcome is awaited.
    Raises their errors.
    """
    remaining, has_read_all = iter(sources), False
    inbox: _Inbox = queue.SimpleQueue()
    streams = [_Stream(index, open_call, inbox) for index, open_call in enumerate(open_calls)]
    try:
        while True:
            while requests.has_room and not has_read_all:
                source = next(remaining, None)
                if source is None:
                    has_read_all = True
                else:
                    requests.add(source)
            _send(requests.take_due(), streams)
            yield from requests.take_outcomes()
            if has_read_all and requests.is_finished:
                for stream in streams:
                    stream.finish()
                return
            if requests.has_room and not has_read_all:
                continue
            _receive(inbox, requests, streams)
    finally:
        for stream in streams:
            stream.end()


def unary_outcomes(
    open_call: Callable[[Source], UnaryCall], sources: Iterable[Source], *, concurrency: int
) -> Iterator[Outcome]:
    """Yield the outcomes as many_outcomes does, with a call for each source."""
    calls: deque[UnaryCall] = deque()
    try:
        for source in sources:
            calls.append(open_call(source))
            if len(calls) == concurrency:
                yield _outcome(calls.popleft())
        while calls:
            yield _outcome(calls.popleft())
    finally:
        for call in calls:
            call.cancel()


def _outcome(call: UnaryCall) -> Outcome:
    try:
        return as_generations(call.result())
    except grpc.RpcError as error:
        return as_server_error(error)


def _send(due: list[tuple[int, inference_pb2.ManyRequest]], streams: Sequence[_Stream]) -> None:
    for index, stream in enumerate(streams):
        stream.send([message for call, message in due if call == index])


def _receive(inbox: _Inbox, requests: ManyRequests, streams: Sequence[_Stream]) -> None:
    """Wait for the next message, or for the time at which a request is to be sent or reaches its deadline."""
    wake_s = requests.wake_s
    try:
        call, number, message = inbox.get(timeout=None if wake_s is None else max(0.0, wake_s - time.monotonic()))
    except queue.Empty:
        return
    if number != streams[call].number:
        return  # of a call that has ended
    if isinstance(message, ServerError):
        streams[call].end()
        requests.fail_call(call, message)
    else:
        requests.read_response(call, message)


class _Stream:
    """A GenerateMany call, opened with the first message to send, and again after it broke.

    A thread reads its messages, because gRPC cannot wait for the next one for a limited time. index: of its connection.
    number: of the call, which its messages bear.
    """

    def __init__(self, index: int, open_call: OpenCall, inbox: _Inbox) -> None:
        self.number = 0
        self._index = index
        self._open_call = open_call
        self._inbox = inbox
        self._call: Any = None
        self._reader = threading.Thread()
        self._outbox: queue.SimpleQueue[inference_pb2.GenerateManyRequest | None] = queue.SimpleQueue()

    def send(self, requests: list[inference_pb2.ManyRequest]) -> None:
        if requests and self._call is None:
            self._outbox = queue.SimpleQueue()
            self._call = self._open_call(iter(self._outbox.get, None))
            self._reader = threading.Thread(target=self._read, args=(self._call, self.number), daemon=True)
            self._reader.start()
        for message in pack(requests):
            self._outbox.put(message)

    def finish(self) -> None:
        """Let the server end the call, so that it counts as complete and not as cancelled."""
        if self._call is not None:
            self._outbox.put(None)
            self._reader.join(END_PATIENCE_S)

    def end(self) -> None:
        """Cancel the call, if there is one."""
        if self._call is not None:
            self._outbox.put(None)
            self._call.cancel()
            self._call = None
            self.number += 1

    def _read(self, call: Any, number: int) -> None:
        end = early_end()
        try:
            for message in call:
                self._inbox.put((self._index, number, message))
        except grpc.RpcError as error:
            end = as_server_error(error)
        self._inbox.put((self._index, number, end))
