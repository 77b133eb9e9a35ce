"""Requests of one GenerateMany call: which are unanswered, what became of each, and what is sent again.

`many_tasks.py` and `many_threads.py` carry the messages.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from antiphon.client.messages import Generation, ServerError, Source, as_generations
from antiphon.client.options import CallOptions
from antiphon.v1 import inference_pb2

DEFAULT_CONCURRENCY = 256
"""Unanswered requests at a time: as many as a server reads of one call."""

END_PATIENCE_S = 1.0
"""Time for the server to end a call whose requests are all answered; after it, the call is cancelled."""

Outcome = list[Generation] | ServerError
"""Every output of a request, best first, or its error."""

# Requests in one message: enough to make its cost small, few enough to keep it far below a server's limit of its size.
_MAX_REQUESTS_PER_MESSAGE = 64
# Outcomes that wait for an earlier one, per unanswered request: one long text does not stop the others.
WINDOW_PER_REQUEST = 4
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Servers end calls that are open while they stop with CANCELLED.
_RETRYABLE_CALL = (*_RETRYABLE, grpc.StatusCode.CANCELLED)


@dataclass(slots=True, eq=False)
class _Pending:
    message: inference_pb2.ManyRequest
    deadline_s: float  # on the monotonic clock; infinity is none
    num_attempts: int = 0
    outcome: Outcome | None = None


class ManyRequests:
    """Requests in the order of their sources, at most `concurrency` of them unanswered. For one thread.

    build: returns the message of a source. call_options: the time limit of each request, all attempts included, and the
    retries. num_calls: calls that share them, each over a connection of its own. Times are seconds of `time.monotonic`.
    """

    def __init__(
        self,
        build: Callable[[Source], inference_pb2.GenerateRequest],
        call_options: CallOptions,
        *,
        concurrency: int,
        num_calls: int = 1,
    ) -> None:
        self._build = build
        self._call_options = call_options
        self._concurrency = concurrency
        self._order: deque[_Pending] = deque()
        self._timed: deque[_Pending] = deque()  # earliest deadline first: every request has the same time limit
        self._sent: list[dict[int, _Pending]] = [{} for _ in range(num_calls)]
        self._unsent: list[tuple[float, int, _Pending]] = []  # heap: due time, id
        self._num_unanswered = self._next_id = 0

    @property
    def has_room(self) -> bool:
        """Return whether one more request may be added now."""
        is_window_open = len(self._order) < WINDOW_PER_REQUEST * self._concurrency
        return is_window_open and self._num_unanswered < self._concurrency

    @property
    def is_finished(self) -> bool:
        """Return whether the outcome of every request was taken."""
        return not self._order

    @property
    def wake_s(self) -> float | None:
        """Time at which the next request is to be sent or reaches its deadline; None is never."""
        while self._timed and self._timed[0].outcome is not None:
            self._timed.popleft()
        times = [self._unsent[0][0]] if self._unsent else []
        times += [self._timed[0].deadline_s] if self._timed else []
        return min(times, default=None)

    def add(self, source: Source) -> None:
        """Add the request of a source, to be sent at once. Raises ValueError."""
        now_s = time.monotonic()
        limit_s = self._call_options.timeout_s
        message = inference_pb2.ManyRequest(id=self._next_id, request=self._build(source), is_whole=True)
        pending = _Pending(message, now_s + (math.inf if limit_s is None else limit_s))
        if limit_s is not None:
            self._timed.append(pending)
        self._order.append(pending)
        self._next_id += 1
        self._num_unanswered += 1
        heapq.heappush(self._unsent, (now_s, message.id, pending))

    def take_due(self) -> list[tuple[int, inference_pb2.ManyRequest]]:
        """Return the requests to be sent now, each with the call to send it over: the one with the fewest unanswered.

        Requests whose time is over end.
        """
        now_s = time.monotonic()
        while self._timed and (first := self._timed[0]).deadline_s <= now_s:
            self._timed.popleft()
            if first.outcome is None:
                self._end(first, ServerError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        due = []
        while self._unsent and self._unsent[0][0] <= now_s:
            pending = heapq.heappop(self._unsent)[2]
            if pending.outcome is not None:
                continue
            if pending.deadline_s < math.inf:
                pending.message.timeout_millis = max(1, round((pending.deadline_s - now_s) * 1000))
            pending.num_attempts += 1
            call = min(range(len(self._sent)), key=lambda index: len(self._sent[index]))
            self._sent[call][pending.message.id] = pending
            due.append((call, pending.message))
        return due

    def take_outcomes(self) -> Iterator[Outcome]:
        """Yield the next outcomes, in the order of their sources, as far as they are known."""
        while self._order and (outcome := self._order[0].outcome) is not None:
            self._order.popleft()
            yield outcome

    def read_response(self, call: int, response: inference_pb2.GenerateManyResponse) -> None:
        """Note the answers in a message of a call. What the server refused for now is sent again later."""
        for answer in response.answers:
            pending = self._sent[call].get(answer.id)
            if pending is None:
                continue
            if answer.HasField("whole"):
                self._end(pending, as_generations(answer.whole))
            elif answer.HasField("failure"):
                error = _server_error(answer.failure)
                self._fail(pending, error, is_retryable=error.code in _RETRYABLE)

    def fail_call(self, call: int, error: ServerError) -> None:
        """Note that a call has ended with an error. What was sent over it is sent again later."""
        for pending in [*self._sent[call].values()]:
            self._fail(pending, error, is_retryable=error.code in _RETRYABLE_CALL)

    def _fail(self, pending: _Pending, error: ServerError, *, is_retryable: bool) -> None:
        retry = self._call_options.retry
        if not is_retryable or pending.num_attempts >= retry.attempts:
            self._end(pending, error)
            return
        backoff_s = min(retry.max_backoff_s, retry.backoff_s * 2 ** (pending.num_attempts - 1))
        self._withdraw(pending)
        due_s = time.monotonic() + (error.retry_after_s or backoff_s)
        heapq.heappush(self._unsent, (due_s, pending.message.id, pending))

    def _end(self, pending: _Pending, outcome: Outcome) -> None:
        pending.outcome = outcome
        self._num_unanswered -= 1
        self._withdraw(pending)

    def _withdraw(self, pending: _Pending) -> None:
        for sent in self._sent:
            sent.pop(pending.message.id, None)


def early_end() -> ServerError:
    """Return the error of a call that ended with OK too early."""
    return ServerError(grpc.StatusCode.UNAVAILABLE, "the server ended the call before its answers")


def pack(messages: list[inference_pb2.ManyRequest]) -> Iterator[inference_pb2.GenerateManyRequest]:
    """Yield messages that send these requests."""
    for begin in range(0, len(messages), _MAX_REQUESTS_PER_MESSAGE):
        yield inference_pb2.GenerateManyRequest(requests=messages[begin : begin + _MAX_REQUESTS_PER_MESSAGE])


def _server_error(failure: inference_pb2.Failure) -> ServerError:
    return ServerError(
        _CODES.get(failure.code, grpc.StatusCode.UNKNOWN),
        failure.message,
        reason=failure.reason,
        field=failure.field or None,
        retry_after_s=failure.retry_after.ToNanoseconds() / 1e9 if failure.HasField("retry_after") else None,
    )
