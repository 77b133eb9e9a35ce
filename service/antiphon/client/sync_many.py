"""Carries many requests over GenerateMany calls, for one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from antiphon.client.many import END_PATIENCE_S, ManyRequests, Outcome, lost, together
from antiphon.client.messages import ServerError, Source, as_server_error
from antiphon.v1 import inference_pb2

OpenCall = Callable[[Iterator[inference_pb2.GenerateManyRequest]], Any]
"""Opens a GenerateMany call that sends the messages of an iterator."""

_Inbox = queue.SimpleQueue[tuple[int, int, inference_pb2.GenerateManyResponse | ServerError]]


def outcomes(open_calls: Sequence[OpenCall], sources: Iterable[Source], requests: ManyRequests) -> Iterator[Outcome]:
    """Yield the outcome of each source, in order. Leaving the iteration cancels what is unanswered.

    open_calls: each opens a call over a connection of its own. Sources are read while the next outcome is awaited.
    Raises their errors.
    """
    rest, is_fed = iter(sources), False
    inbox: _Inbox = queue.SimpleQueue()
    talks = [_Talk(index, open_call, inbox) for index, open_call in enumerate(open_calls)]
    try:
        while True:
            while requests.has_room and not is_fed:
                source = next(rest, None)
                if source is None:
                    is_fed = True
                else:
                    requests.add(source)
            _send(requests.due(), talks)
            yield from requests.take()
            if is_fed and requests.is_finished:
                for talk in talks:
                    talk.finish()
                return
            if requests.has_room and not is_fed:
                continue
            _receive(inbox, requests, talks)
    finally:
        for talk in talks:
            talk.end()


def _send(due: list[tuple[int, inference_pb2.ManyRequest]], talks: Sequence[_Talk]) -> None:
    for index, talk in enumerate(talks):
        talk.send([message for call, message in due if call == index])


def _receive(inbox: _Inbox, requests: ManyRequests, talks: Sequence[_Talk]) -> None:
    """Wait for the next message, or for the time at which a request is to be sent or reaches its deadline."""
    wake_s = requests.wake_s
    try:
        call, number, message = inbox.get(timeout=None if wake_s is None else max(0.0, wake_s - time.monotonic()))
    except queue.Empty:
        return
    if number != talks[call].number:
        return  # of a call that has ended
    if isinstance(message, ServerError):
        talks[call].end()
        requests.broken(call, message)
    else:
        requests.read(call, message)


class _Talk:
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
        self._written: queue.SimpleQueue[inference_pb2.GenerateManyRequest | None] = queue.SimpleQueue()

    def send(self, requests: list[inference_pb2.ManyRequest]) -> None:
        if requests and self._call is None:
            self._written = queue.SimpleQueue()
            self._call = self._open_call(iter(self._written.get, None))
            self._reader = threading.Thread(target=self._read, args=(self._call, self.number), daemon=True)
            self._reader.start()
        for message in together(requests):
            self._written.put(message)

    def finish(self) -> None:
        """Let the server end the call, so that it counts as complete and not as cancelled."""
        if self._call is not None:
            self._written.put(None)
            self._reader.join(END_PATIENCE_S)

    def end(self) -> None:
        """Cancel the call, if there is one."""
        if self._call is not None:
            self._written.put(None)
            self._call.cancel()
            self._call = None
            self.number += 1

    def _read(self, call: Any, number: int) -> None:
        end = lost()
        try:
            for message in call:
                self._inbox.put((self._index, number, message))
        except grpc.RpcError as error:
            end = as_server_error(error)
        self._inbox.put((self._index, number, end))
