"""Record of one RPC: its request id, its requests to engines, and its status. No text and no tokens.

The record is filled while the call runs, in the event loop only. `telemetry.py` reports it to metrics, logs and spans
at the end. The current call is a context variable, because every RPC runs in its own task.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.domain.errors import AntiphonError
from antiphon.domain.request import CancelCause, FinishReason, Request, Timing, TokenEvent
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.observability.trace_context import TraceContext

REQUEST_ID_KEY = "x-request-id"
TRACE_PARENT_KEY = "traceparent"
MAX_REQUEST_ID_LEN = 128

Text = str | bytes


class Events(Protocol):
    """Source of the terminal events of one request: the engine's stream.

    on_end: called with every terminal event; None after the last. cancel_cause: reason of a cancellation, if any.
    """

    on_end: Callable[[TokenEvent], None] | None
    cancel_cause: CancelCause | None


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """Request of a call that an engine admitted, and its stream.

    is_over: its last event has arrived. timing, num_generated: copied from that event, which may hold megabytes.
    """

    request: Request
    stream: Events
    finish_reasons: list[FinishReason] = field(default_factory=list)
    is_over: bool = False
    timing: Timing | None = None
    num_generated: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """RPC in flight.

    method: `package.Service/Method`. trace: its trace, or None. arrival_s, ended_s: times of the server's clock.
    caller: name of the client, as `caller.py` gives it. connection: address of the client's end.
    num_metadata_bytes: size of the client's metadata, as HTTP/2 counts it.
    model_name, metrics: model that it was routed to; "" and None before.
    trailers: trailing metadata, sent on success and on failure, the request id first.
    num_messages: messages written to its stream. num_unsent_bytes: size of the message that is being written.
    code: name of the final gRPC status.
    error: error that the client received instead of an answer.
    """

    method: str
    request_id: str
    arrival_s: float
    caller: str = ""
    connection: str = ""
    num_metadata_bytes: int = 0
    trace: TraceContext | None = None
    model_name: str = ""
    metrics: Metrics | None = None
    trailers: list[tuple[str, Text]] = field(init=False)
    requests: list[AdmittedRequest] = field(default_factory=list)
    code: str = ""
    error: AntiphonError | None = None
    ended_s: float | None = None
    num_messages: int = 0
    num_unsent_bytes: int = 0
    _on_settled: Callable[[Call], None] | None = None

    def __post_init__(self) -> None:
        self.trailers = [(REQUEST_ID_KEY, self.request_id)]

    def routed(self, model_name: str, metrics: Metrics) -> None:
        """Record the model that answers it."""
        self.model_name = model_name
        self.metrics = metrics

    @property
    def trace_id(self) -> str:
        """Id of its trace if that is recorded, otherwise empty."""
        return self.trace.trace_id if self.trace is not None and self.trace.is_sampled else ""

    def admitted(self, request: Request, stream: Events) -> None:
        """Record a request that an engine has admitted, and the terminal events of its stream."""
        admitted = AdmittedRequest(request, stream)
        self.requests.append(admitted)

        def note(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                admitted.finish_reasons.append(event.finish_reason)
            if event.is_last:
                admitted.is_over, admitted.timing, admitted.num_generated = True, event.timing, event.num_generated
                self._settle()

        stream.on_end = note

    @property
    def has_written(self) -> bool:
        """True when a message of its stream was sent, or is being sent."""
        return bool(self.num_messages or self.num_unsent_bytes)

    @property
    def is_refused(self) -> bool:
        """True when it failed before an engine admitted a request of it."""
        return self.error is not None and not self.requests

    def end(self, ended_s: float, on_settled: Callable[[Call], None]) -> None:
        """Record the end of the RPC. on_settled is called when its requests have ended too, perhaps a step later."""
        self.ended_s = ended_s
        self._on_settled = on_settled
        self._settle()

    def _settle(self) -> None:
        if self._on_settled is not None and all(admitted.is_over for admitted in self.requests):
            on_settled, self._on_settled = self._on_settled, None
            on_settled(self)


_current: ContextVar[Call | None] = ContextVar("antiphon_call", default=None)
enter_call = _current.set
"""Make a call the current one of this task, and of the tasks and threads that it starts."""
current_call = _current.get
"""Return the current call, None outside of calls."""


class RequestIds:
    """Accepts the client's request id if it is printable, else creates one: short and unique among servers."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def of(self, given: Text | None) -> str:
        """Return the id of a call whose client sent `given` as x-request-id."""
        if isinstance(given, str) and is_request_id(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"


def is_request_id(text: str) -> bool:
    """Return whether a text is a valid request id: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= MAX_REQUEST_ID_LEN and text.isascii() and text.isprintable() and " " not in text


def find_metadata(metadata: Iterable[tuple[str, Text]]) -> tuple[Text | None, Text | None]:
    """Return x-request-id and traceparent of a call's metadata, the first of several values."""
    request_id = traceparent = None
    for key, value in metadata:
        if key == REQUEST_ID_KEY and request_id is None:
            request_id = value
        elif key == TRACE_PARENT_KEY and traceparent is None:
            traceparent = value
    return request_id, traceparent
