"""Record of one RPC: its request id, its requests to engines, and its status. No text and no tokens.

The record is filled while the call runs, in the event loop only. `telemetry.py` reports it to metrics, logs and spans
at the end. Only log lines take the request id from a context variable: any code may write them.
"""

from __future__ import annotations

import itertools
import random
import re
import secrets
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.domain.errors import AntiphonError
from antiphon.domain.request import CancelCause, FinishReason, Request, Timing, TokenEvent
from antiphon.observability.engine_metrics import Metrics

_TRACE_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position of a call in a trace; ids are in lower-case hexadecimal.

    trace_id: 32 digits. parent_id: 16 digits of the client's span; None if the trace begins here.
    is_sampled: True if the trace is recorded.
    """

    trace_id: str
    parent_id: str | None
    is_sampled: bool


def read_trace_parent(text: str | bytes | None) -> TraceContext | None:
    """Return the content of a client's traceparent; None if it is absent or malformed."""
    match = _TRACE_PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[1] == "00" and match[5]):  # later versions may have more fields
        return None
    return TraceContext(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))


class Sampler:
    """Begins traces for a share of the calls without a trace. ratio: from 0 to 1."""

    def __init__(self, ratio: float, randomness: random.Random | None = None) -> None:
        self._ratio = ratio
        self._random = randomness or random.Random()

    def begin(self) -> TraceContext | None:
        """Return a new trace, or None for a call that is not recorded."""
        if self._ratio < 1 and self._random.random() >= self._ratio:
            return None
        return TraceContext(f"{self._random.getrandbits(128) or 1:032x}", None, is_sampled=True)


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
    """Request of a call that an engine admitted, and its stream."""

    request: Request
    stream: Events
    finish_reasons: list[FinishReason] = field(default_factory=list)
    is_over: bool = False
    """True once its last event has arrived."""
    timing: Timing | None = None
    """Copied from the last event, which may hold megabytes, as is num_generated."""
    num_generated: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class CallRecord:
    """Account of an RPC, or of one request of an RPC with many."""

    method: str
    """`package.Service/Method`."""
    request_id: str
    arrival_s: float
    """Time of the server's clock."""
    caller: str = ""
    """Name of the client, by which clients share the server."""
    connection: str = ""
    """Address of the client's end."""
    num_metadata_bytes: int = 0
    """Size of the client's metadata, as HTTP/2 counts it."""
    trace: TraceContext | None = None
    model_name: str = ""
    """Model that it was routed to; "" before."""
    metrics: Metrics | None = None
    """Metrics of that model."""
    trailers: list[tuple[str, Text]] = field(init=False)
    """Trailing metadata, sent on success and on failure, the request id first."""
    requests: list[AdmittedRequest] = field(default_factory=list)
    code: str = ""
    """Name of the final gRPC status."""
    error: AntiphonError | None = None
    """Error that the client received instead of an answer."""
    ended_s: float | None = None
    num_messages: int = 0
    """Messages written to its stream."""
    num_unsent_bytes: int = 0
    """Size of the message that is being written."""
    _on_settled: Callable[[CallRecord], None] | None = None

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
            if event.is_last and event.finish_reason is None:  # the engine of another process has refused it
                self.requests.remove(admitted)
                self._settle()
                return
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

    def end(self, ended_s: float, on_settled: Callable[[CallRecord], None]) -> None:
        """Record the end of the RPC. on_settled is called when its requests have ended too, perhaps a step later."""
        self.ended_s = ended_s
        self._on_settled = on_settled
        self._settle()

    def _settle(self) -> None:
        if self._on_settled is not None and all(admitted.is_over for admitted in self.requests):
            on_settled, self._on_settled = self._on_settled, None
            on_settled(self)


log_request_id: ContextVar[str] = ContextVar("antiphon_request_id", default="")
"""Request id in the log lines of this task, and of the tasks and threads that it starts; "" outside of calls."""


class RequestIds:
    """Accepts the client's request id if it is printable, else creates one: short and unique among servers."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def of(self, sent: Text | None) -> str:
        """Return the id of a call whose client sent this x-request-id."""
        if isinstance(sent, str) and is_request_id(sent):
            return sent
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
