"""Requests of one GenerateMany call: which are unanswered, what became of each, and what is sent again.

Opens no connection: `async_many.py` and `sync_many.py` carry the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from antiphon.client.connection import RetryPolicy
from antiphon.client.messages import Generation, ServerError, Source, as_generations
from antiphon.v1 import inference_pb2

DEFAULT_CONCURRENCY = 256
"""Unanswered requests at a time: as many as a server reads of one call."""

Outcome = list[Generation] | ServerError
"""Every output of a request, best first, or its error."""

LOST = ServerError(grpc.StatusCode.UNAVAILABLE, "the server ended the call before its answers")
"""Error of a call that ended with OK too early."""

# Requests in one message: enough to make its cost small, few enough to keep it far below a server's limit of its size.
_MOST_TOGETHER = 64
# Outcomes that wait for an earlier one, per unanswered request: one long text does not stop the others.
_WINDOW_PER_REQUEST = 4
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Servers end calls that are open while they stop with CANCELLED.
_RETRYABLE_CALL = (*_RETRYABLE, grpc.StatusCode.CANCELLED)


Delayed = tuple[float, inference_pb2.ManyRequest]
"""A request to be sent again, after this many seconds."""


@dataclass(slots=True, eq=False)
class _Asked:
    message: inference_pb2.ManyRequest
    num_attempts: int = 1
    outcome: Outcome | None = None


class ManyRequests:
    """Requests in the order of their sources, at most `concurrency` of them unanswered.

    build: returns the message of a source. timeout_s: time limit of each attempt.
    """

    def __init__(
        self,
        build: Callable[[Source], inference_pb2.GenerateRequest],
        *,
        concurrency: int,
        retry: RetryPolicy,
        timeout_s: float | None,
    ) -> None:
        self._build = build
        self._concurrency = concurrency
        self._retry = retry
        self._timeout_millis = None if timeout_s is None else max(1, round(timeout_s * 1000))
        self._order: deque[_Asked] = deque()
        self._unanswered: dict[int, _Asked] = {}
        self._next_id = 0

    @property
    def has_room(self) -> bool:
        """Return whether one more request may be added now."""
        is_window_open = len(self._order) < _WINDOW_PER_REQUEST * self._concurrency
        return is_window_open and len(self._unanswered) < self._concurrency

    @property
    def num_unanswered(self) -> int:
        """Number of requests without an answer, sent or not."""
        return len(self._unanswered)

    @property
    def is_finished(self) -> bool:
        """Return whether the outcome of every request was taken."""
        return not self._order

    def add(self, source: Source) -> inference_pb2.ManyRequest:
        """Add the request of a source. Return the message to send. Raises ValueError."""
        message = inference_pb2.ManyRequest(
            id=self._next_id, request=self._build(source), timeout_millis=self._timeout_millis, is_whole=True
        )
        asked = self._unanswered[self._next_id] = _Asked(message)
        self._order.append(asked)
        self._next_id += 1
        return message

    def take(self) -> Iterator[Outcome]:
        """Yield the next outcomes, in the order of their sources, as far as they are known."""
        while self._order and (outcome := self._order[0].outcome) is not None:
            self._order.popleft()
            yield outcome

    def read(self, response: inference_pb2.GenerateManyResponse) -> list[Delayed]:
        """Note the answers of a message. Return requests that the server refused for now."""
        again: list[Delayed] = []
        for answer in response.answers:
            asked = self._unanswered.get(answer.id)
            if asked is None:
                continue
            if answer.HasField("whole"):
                self._end(asked, as_generations(answer.whole))
            elif answer.HasField("failure"):
                error = _server_error(answer.failure)
                again += self._failed(asked, error, error.code in _RETRYABLE)
        return again

    def broken(self, error: ServerError) -> list[Delayed]:
        """Note that the call has ended with an error. Return the requests for another call."""
        is_retryable = error.code in _RETRYABLE_CALL
        return [one for asked in [*self._unanswered.values()] for one in self._failed(asked, error, is_retryable)]

    def _failed(self, asked: _Asked, error: ServerError, is_retryable: bool) -> list[Delayed]:  # noqa: FBT001
        if not is_retryable or asked.num_attempts >= self._retry.attempts:
            self._end(asked, error)
            return []
        backoff_s = min(self._retry.max_backoff_s, self._retry.backoff_s * 2 ** (asked.num_attempts - 1))
        asked.num_attempts += 1
        return [(error.retry_after_s or backoff_s, asked.message)]

    def _end(self, asked: _Asked, outcome: Outcome) -> None:
        asked.outcome = outcome
        del self._unanswered[asked.message.id]


def together(messages: list[inference_pb2.ManyRequest]) -> Iterator[inference_pb2.GenerateManyRequest]:
    """Yield messages that send these requests."""
    for begin in range(0, len(messages), _MOST_TOGETHER):
        yield inference_pb2.GenerateManyRequest(requests=messages[begin : begin + _MOST_TOGETHER])


def _server_error(failure: inference_pb2.Failure) -> ServerError:
    return ServerError(
        _CODES.get(failure.code, grpc.StatusCode.UNKNOWN),
        failure.message,
        reason=failure.reason,
        field=failure.field or None,
        retry_after_s=failure.retry_after.ToNanoseconds() / 1e9 if failure.HasField("retry_after") else None,
    )
