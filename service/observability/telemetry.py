"""What is told of every RPC when it is over. Decides what counts as a refusal; renders nothing itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from antiphon.service.domain.caller import caller_of
from antiphon.service.observability.call import Call, RequestIds, find_metadata
from antiphon.service.observability.metric_families import MetricFamilies
from antiphon.service.observability.rpc_metrics import RpcMetrics
from antiphon.service.observability.trace_context import Sampler, read_trace_parent

# What HTTP/2 adds for each pair of metadata when it counts their bytes.
_PAIR_BYTES = 32

Context = grpc.aio.ServicerContext[Any, Any]
Sink = Callable[[Call], None]
"""Takes every call that is over, in the event loop: it must not block."""


class Telemetry:
    """Opens and closes the accounts of RPCs, for the event loop.

    sinks: where closed ones go. sampler: begins traces for calls without one; None where nobody would see them.
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
        """Return one that counts RPCs together with this one, and tells nobody else of them."""
        quiet = copy.copy(self)
        quiet._sinks = ()
        return quiet

    def expect(self, method: str) -> None:
        """Show the counts of a method at zero."""
        self._metrics.expect(method)

    def begin(self, method: str, context: Context) -> Call:
        """Open the account of a call that arrives now; exactly one `end` and one `left` are to follow."""
        self._metrics.begun()
        metadata = context.invocation_metadata() or ()
        request_id, traceparent = find_metadata(metadata)
        return Call(
            method=method,
            request_id=self._ids.of(request_id),
            arrival_s=self._clock(),
            caller=caller_of(context),
            connection=context.peer(),
            num_metadata_bytes=sum(len(key) + len(value) + _PAIR_BYTES for key, value in metadata),
            trace=read_trace_parent(traceparent) or (self._sampler.begin() if self._sampler else None),
        )

    def end(self, call: Call) -> None:
        """Count a call that is over, and tell of it once its requests are."""
        self._metrics.handled(call.method, call.code)
        if call.error is not None and call.is_refused:
            refused = self._metrics.refused if call.metrics is None else call.metrics.refused
            refused(call.error.reason)
        if call.num_messages and call.metrics is not None:
            call.metrics.streamed(call.num_messages)
        call.end(self._clock(), self._tell)

    def left(self) -> None:
        """Note that a call is in flight no longer: its status is written, or nobody waits for it."""
        self._metrics.left()

    def _tell(self, call: Call) -> None:
        for sink in self._sinks:
            sink(call)
