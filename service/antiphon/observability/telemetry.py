"""Reports every RPC at its end to metrics, log and spans. Decides what counts as a refusal."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from antiphon.domain.errors import Status, refusal_reasons
from antiphon.observability.call import CallRecord, RequestIds, Sampler, Text, find_metadata, read_trace_parent
from antiphon.observability.metrics import MetricFamilies

# Bytes that HTTP/2 adds for each metadata pair when it counts their size.
_PAIR_BYTES = 32

Sink = Callable[[CallRecord], None]
"""Receives every finished call, in the event loop: it must not block."""


class Telemetry:
    """Records the begin and the end of RPCs. For the event loop.

    sinks: receive finished calls. sampler: begins traces for calls without one; None if no spans are exported.
    """

    def __init__(
        self,
        families: MetricFamilies,
        *sinks: Sink,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = RpcMetrics(families)
        self._sinks = sinks
        self._sampler = sampler
        self._clock = clock
        self._ids = RequestIds()

    def without_sinks(self) -> Telemetry:
        """Return a Telemetry that counts RPCs in the same metrics, and sends no calls to the sinks."""
        quiet = copy.copy(self)
        quiet._sinks = ()
        return quiet

    def expect(self, method: str) -> None:
        """Show the metrics of a method at zero."""
        self._metrics.expect(method)

    def begin(self, method: str, metadata: Sequence[tuple[str, Text]], *, caller: str, connection: str) -> CallRecord:
        """Begin the record of a call that arrives now. Exactly one `end` and one `left` must follow."""
        self._metrics.begun()
        request_id, traceparent = find_metadata(metadata)
        return CallRecord(
            method=method,
            request_id=self._ids.of(request_id),
            arrival_s=self._clock(),
            caller=caller,
            connection=connection,
            num_metadata_bytes=sum(len(key) + len(value) + _PAIR_BYTES for key, value in metadata),
            trace=read_trace_parent(traceparent) or (self._sampler.begin() if self._sampler else None),
        )

    def begin_request(self, call: CallRecord, method: str, request_id: str) -> CallRecord:
        """Begin the record of one request of a call, with the call's client and trace. Ends as a call."""
        self._metrics.begun()
        return CallRecord(
            method=method,
            request_id=request_id,
            arrival_s=self._clock(),
            caller=call.caller,
            connection=call.connection,
            trace=call.trace,
        )

    def end(self, call: CallRecord) -> None:
        """Count a finished call, and send it to the sinks once its requests have ended."""
        self._metrics.handled(call.method, call.code)
        if call.error is not None and call.is_refused:
            refused = self._metrics.refused if call.metrics is None else call.metrics.refused
            refused(call.error.reason)
        if call.num_messages and call.metrics is not None:
            call.metrics.streamed(call.num_messages)
        call.end(self._clock(), self._send)

    def left(self) -> None:
        """Record that a call is no longer in flight: its status is written, or its client has left."""
        self._metrics.left()

    def _send(self, call: CallRecord) -> None:
        for sink in self._sinks:
            sink(call)


class RpcMetrics:
    """Metrics of RPCs, independent of the model that they name. For the event loop."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._handled: dict[tuple[str, str], Counter] = {}
        self._num_in_flight = 0
        families.rpcs_in_flight.set_function(lambda: self._num_in_flight)
        for reason in refusal_reasons():
            families.requests_refused.labels("", reason)

    def expect(self, method: str) -> None:
        """Show a method's counts at zero, for every possible status."""
        if (method, "OK") not in self._handled:
            for code in ("OK", *Status.__members__):
                self._handled[method, code] = self._families.rpcs_handled.labels(method, code)

    def begun(self) -> None:
        """Record that an RPC has begun."""
        self._num_in_flight += 1

    def handled(self, method: str, code: str) -> None:
        """Count a finished RPC. method: its full name, which must be one of the server's. code: name of its status."""
        child = self._handled.get((method, code))
        if child is None:
            child = self._handled[method, code] = self._families.rpcs_handled.labels(method, code)
        child.inc()

    def left(self) -> None:
        """Record that an RPC is no longer in flight."""
        self._num_in_flight -= 1

    def refused(self, reason: str) -> None:
        """Count an RPC that was refused before its model was known."""
        self._families.requests_refused.labels("", reason).inc()
