"""Carries many requests over GenerateMany calls, for one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from antiphon.client.many import ManyRequests, Outcome, is_known, lost, together
from antiphon.client.messages import ServerError, Source, as_server_error
from antiphon.v1 import inference_pb2

OpenCall = Callable[[Iterator[inference_pb2.GenerateManyRequest]], Any]
"""Opens a GenerateMany call that sends the messages of an iterator."""


def outcomes(open_call: OpenCall, sources: Iterable[Source], requests: ManyRequests) -> Iterator[Outcome]:
    """Yield the outcome of each source, in order. Leaving the iteration cancels what is unanswered.

    Sources are read while the next outcome is awaited. Raises their errors.
    """
    rest, is_fed = iter(sources), False
    talk = _Talk(open_call)
    try:
        while True:
            while requests.has_room and not is_fed:
                source = next(rest, None)
                if source is None:
                    is_fed = True
                else:
                    requests.add(source)
            talk.send(requests.due())
            yield from requests.take()
            if is_fed and requests.is_finished:
                return
            if requests.has_room and not is_fed:
                continue
            try:
                response = talk.receive(requests.wake_s)
                if response is not None:
                    requests.read(response)
            except ServerError as error:
                requests.broken(error)
    finally:
        talk.end()


class _Talk:
    """A GenerateMany call, opened with the first message to send, and again after it broke.

    A thread reads its messages, because gRPC cannot wait for the next one for a limited time.
    """

    def __init__(self, open_call: OpenCall) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._written: queue.SimpleQueue[inference_pb2.GenerateManyRequest | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[inference_pb2.GenerateManyResponse | ServerError] = queue.SimpleQueue()

    def send(self, requests: list[inference_pb2.ManyRequest]) -> None:
        if requests and self._call is None:
            self._written, self._read = queue.SimpleQueue(), queue.SimpleQueue()
            self._call = self._open_call(iter(self._written.get, None))
            threading.Thread(target=_read, args=(self._call, self._read), daemon=True).start()
        for message in together(requests):
            self._written.put(message)

    def receive(self, until_s: float | None) -> inference_pb2.GenerateManyResponse | None:
        """Return the next message, or None if none has come until this time. Raises ServerError if the call ended."""
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        try:
            message = self._read.get(timeout=left_s)
        except queue.Empty:
            return None
        if isinstance(message, ServerError):
            self.end()
            raise message
        return message

    def end(self) -> None:
        """Cancel the call, if there is one."""
        if self._call is not None:
            self._written.put(None)
            self._call.cancel()
            self._call = None


def is_offered(call: Any) -> bool | None:
    """Return whether the server of a call without messages knows GenerateMany. None: it cannot be reached."""
    return is_known(call.code())


def _read(call: Any, messages: queue.SimpleQueue[inference_pb2.GenerateManyResponse | ServerError]) -> None:
    try:
        for message in call:
            messages.put(message)
    except grpc.RpcError as error:
        messages.put(as_server_error(error))
    else:
        messages.put(lost())
