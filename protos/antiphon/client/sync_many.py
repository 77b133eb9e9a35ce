"""Carries many requests over GenerateMany calls, for one thread."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from antiphon.client.many import LOST, Delayed, ManyRequests, Outcome, together
from antiphon.client.messages import ServerError, Source, as_server_error
from antiphon.v1 import inference_pb2

OpenCall = Callable[[Iterator[inference_pb2.GenerateManyRequest]], Any]
"""Opens a GenerateMany call that sends the messages of an iterator."""


def outcomes(open_call: OpenCall, sources: Iterable[Source], requests: ManyRequests) -> Iterator[Outcome]:
    """Yield the outcome of each source, in order. Leaving the iteration cancels what is unanswered.

    Sources are read while the next outcome is awaited. Raises their errors.
    """
    rest, is_fed = iter(sources), False
    later: list[Delayed] = []  # with the times of sending instead of delays
    talk = _Talk(open_call)
    try:
        while True:
            now_s = time.monotonic()
            unsent = [message for due_s, message in later if due_s <= now_s]
            later = [one for one in later if one[0] > now_s]
            while requests.has_room and not is_fed:
                source = next(rest, None)
                if source is None:
                    is_fed = True
                else:
                    unsent.append(requests.add(source))
            talk.send(unsent)
            yield from requests.take()
            if is_fed and requests.is_finished:
                return
            if requests.num_unanswered == len(later):
                time.sleep(max(0.0, min(due_s for due_s, _ in later) - time.monotonic()))
                continue
            try:
                later += _due(requests.read(talk.receive()))
            except ServerError as error:
                later = _due(requests.broken(error))
    finally:
        talk.end()


class _Talk:
    """A GenerateMany call, opened with the first message to send, and again after it broke."""

    def __init__(self, open_call: OpenCall) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._messages: queue.SimpleQueue[inference_pb2.GenerateManyRequest | None] = queue.SimpleQueue()

    def send(self, requests: list[inference_pb2.ManyRequest]) -> None:
        if requests and self._call is None:
            self._messages = queue.SimpleQueue()
            self._call = self._open_call(iter(self._messages.get, None))
        for message in together(requests):
            self._messages.put(message)

    def receive(self) -> inference_pb2.GenerateManyResponse:
        """Return the next message. Raises ServerError if the call has ended."""
        try:
            response: inference_pb2.GenerateManyResponse = next(self._call)
        except StopIteration:
            self.end()
            raise LOST from None
        except grpc.RpcError as error:
            self.end()
            raise as_server_error(error) from None
        return response

    def end(self) -> None:
        """Cancel the call, if there is one."""
        if self._call is not None:
            self._messages.put(None)
            self._call.cancel()
            self._call = None


def is_offered(open_call: OpenCall) -> bool:
    """Return whether the server knows GenerateMany. If it cannot be reached, the requests will say so."""
    code: grpc.StatusCode = open_call(iter(())).code()
    return code is not grpc.StatusCode.UNIMPLEMENTED


def _due(delayed: list[Delayed]) -> list[Delayed]:
    now_s = time.monotonic()
    return [(now_s + delay_s, message) for delay_s, message in delayed]
