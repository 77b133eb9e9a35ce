"""Sends the spans of calls to an OpenTelemetry collector, over OTLP and gRPC, from a thread of its own.

Never holds up a call: what the collector does not take is dropped, and counted. Imports opentelemetry, as span_tree.py
does. Headers, certificates and compression come from the exporter's own variables, OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from antiphon.service.call import Call
from antiphon.service.metric_families import MetricFamilies
from antiphon.service.span_tree import SpanTree

log = logging.getLogger(__name__)

_MAX_QUEUED_CALLS = 4096
_MAX_BATCH_CALLS = 256
# How long a call may wait for others to be sent with it.
_GATHER_S = 1.0
_EXPORT_TIMEOUT_S = 10.0


class Spans:
    """A sink of calls; only those of a recorded trace are taken. `close` sends what is left."""

    def __init__(self, exporter: SpanExporter, families: MetricFamilies) -> None:
        self._exporter = exporter
        self._exported = families.spans_exported
        self._dropped = families.spans_dropped
        self._tree = SpanTree(_resource())
        self._calls: queue.Queue[tuple[Call, float] | None] = queue.Queue(_MAX_QUEUED_CALLS)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="antiphon-spans", daemon=True)
        self._thread.start()

    def __call__(self, call: Call) -> None:
        """Take a call that is over; at once."""
        if not call.trace_id:
            return
        try:
            self._calls.put_nowait((call, time.time() - time.monotonic()))
        except queue.Full:
            self._dropped.labels("queue_full").inc()

    def close(self, timeout_s: float) -> None:
        """Send what was taken, for at most so many seconds. Blocks."""
        end_s = time.monotonic() + timeout_s
        self._is_closing = True
        try:
            self._calls.put(None, timeout=timeout_s)  # wakes the thread
        except queue.Full:
            log.warning("spans are left over: the collector takes none")
        self._thread.join(max(0.0, end_s - time.monotonic()))
        self._exporter.shutdown()  # a send under way is given up

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = list(self._gather())
            is_open = None not in batch
            self._send([one for one in batch if one is not None])

    def _gather(self) -> Iterator[tuple[Call, float] | None]:
        """The next calls: the first whenever it comes, others that come soon after; None is the end."""
        first = self._calls.get()
        yield first
        end_s = time.monotonic() + _GATHER_S
        for _ in range(_MAX_BATCH_CALLS - 1):
            wait_s = 0.0 if self._is_closing or first is None else max(0.0, end_s - time.monotonic())
            try:
                yield self._calls.get(timeout=wait_s) if wait_s else self._calls.get_nowait()
            except queue.Empty:
                return

    def _send(self, batch: list[tuple[Call, float]]) -> None:
        spans: list[ReadableSpan] = []
        try:
            for call, wall_offset_s in batch:
                spans += self._tree.spans(call, wall_offset_s)
            if spans and self._exporter.export(spans) is SpanExportResult.SUCCESS:
                self._exported.inc(len(spans))
            elif spans:
                self._dropped.labels("not_exported").inc(len(spans))
        except Exception:  # whatever it was, later spans are still to be sent
            log.exception("%d spans could not be sent", len(spans))
            self._dropped.labels("not_exported").inc(len(spans))


def open_spans(endpoint: str, families: MetricFamilies) -> Spans:
    """Send spans to a collector at http://host:port, or with TLS at https://host:port."""
    return Spans(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S), families)


def _resource() -> Resource:
    """What the spans are of: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, where set, say more."""
    name = os.environ.get("OTEL_SERVICE_NAME") or "antiphon"
    try:
        version = metadata.version("antiphon")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        version = "unknown"
    return Resource.create({"service.name": name, "service.version": version})
