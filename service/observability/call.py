"""One RPC as it is accounted for: its request id, what it asked of engines, and how it ended. No text, no token.

What is known of a call is collected here while it runs, in the event loop only; metrics, logs and spans are made of it
when it is over (`telemetry.py`). The call under way is the context's: every RPC runs in a task of its own.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from antiphon.service.domain.cancellation import CancelCause
from antiphon.service.domain.errors import AntiphonError
from antiphon.service.domain.request import FinishReason, Request, Timing, TokenEvent
from antiphon.service.observability.metrics import Metrics
from antiphon.service.observability.trace_context import TraceContext

REQUEST_ID_KEY = "x-request-id"
TRACE_PARENT_KEY = "traceparent"
MAX_REQUEST_ID_LEN = 128

Text = str | bytes


class Events(Protocol):
    """Terminal events of one request, as the engine's stream gives them.

    on_end: called with every terminal event; None after the last. cancel_cause: reason of a cancellation, if any.
    """

    on_end: Callable[[TokenEvent], None] | None
    cancel_cause: CancelCause | None


@dataclass(slots=True, eq=False)
class Asked:
    """A request of a call that an engine admitted, and its stream.

    is_over: its last event has come. timing, num_generated: of that event, which itself may hold megabytes.
    """

    request: Request
    stream: Events
    finish_reasons: list[FinishReason] = field(default_factory=list)
    is_over: bool = False
    timing: Timing | None = None
    num_generated: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """An RPC under way.

    method: `package.Service/Method`. trace: where it belongs; None to none. arrival_s, ended_s: of the server's clock.
    caller: who asks, as `caller.py` names it. connection: the address of the client's end.
    num_metadata_bytes: of the client's metadata, as HTTP/2 counts them.
    model_name, metrics: of the model it was routed to; "" and None before.
    trailers: what goes back in trailing metadata whether it succeeds or fails, the request id first.
    num_messages: written to its stream. num_unsent_bytes: of the message that is being written.
    code: name of the gRPC status it ended with.
    error: what the client was told instead of an answer.
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
    asked: list[Asked] = field(default_factory=list)
    code: str = ""
    error: AntiphonError | None = None
    ended_s: float | None = None
    num_messages: int = 0
    num_unsent_bytes: int = 0
    _on_settled: Callable[[Call], None] | None = None

    def __post_init__(self) -> None:
        self.trailers = [(REQUEST_ID_KEY, self.request_id)]

    def routed(self, model_name: str, metrics: Metrics) -> None:
        """Note the model that answers it."""
        self.model_name = model_name
        self.metrics = metrics

    @property
    def trace_id(self) -> str:
        """The id of its trace, if that is recorded; otherwise empty."""
        return self.trace.trace_id if self.trace is not None and self.trace.is_sampled else ""

    def admitted(self, request: Request, stream: Events) -> None:
        """Note a request that an engine has admitted, and its ends as they come through its stream."""
        asked = Asked(request, stream)
        self.asked.append(asked)

        def note(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                asked.finish_reasons.append(event.finish_reason)
            if event.is_last:
                asked.is_over, asked.timing, asked.num_generated = True, event.timing, event.num_generated
                self._settle()

        stream.on_end = note

    @property
    def has_written(self) -> bool:
        """True when a message of its stream was sent, or is being sent."""
        return bool(self.num_messages or self.num_unsent_bytes)

    @property
    def is_refused(self) -> bool:
        """Whether it failed before an engine took it up."""
        return self.error is not None and not self.asked

    def end(self, ended_s: float, on_settled: Callable[[Call], None]) -> None:
        """Note that the RPC is over; on_settled is called once its requests are over too, perhaps a step later."""
        self.ended_s = ended_s
        self._on_settled = on_settled
        self._settle()

    def _settle(self) -> None:
        if self._on_settled is not None and all(asked.is_over for asked in self.asked):
            on_settled, self._on_settled = self._on_settled, None
            on_settled(self)


_current: ContextVar[Call | None] = ContextVar("antiphon_call", default=None)
enter_call = _current.set
"""Make a call the one under way in this task, and in the tasks and threads that it starts."""
current_call = _current.get
"""The call under way, None outside of any."""


class RequestIds:
    """Takes the client's request id where it is fit to be shown, or makes one: short, and unique among servers."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def of(self, given: Text | None) -> str:
        """The id of a call whose client sent `given` as x-request-id."""
        if isinstance(given, str) and is_request_id(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"


def is_request_id(text: str) -> bool:
    """Whether a text may be a request id: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= MAX_REQUEST_ID_LEN and text.isascii() and text.isprintable() and " " not in text


def find_metadata(metadata: Iterable[tuple[str, Text]]) -> tuple[Text | None, Text | None]:
    """The x-request-id and the traceparent in a call's metadata; the first where there are several."""
    request_id = traceparent = None
    for key, value in metadata:
        if key == REQUEST_ID_KEY and request_id is None:
            request_id = value
        elif key == TRACE_PARENT_KEY and traceparent is None:
            traceparent = value
    return request_id, traceparent
