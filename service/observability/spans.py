"""Sends the spans of calls to an OpenTelemetry collector, over OTLP and gRPC, from a thread of its own.

Never holds up a call: what the collector does not take is dropped, and counted. Imports opentelemetry, as span_tree.py
does. Headers, certificates and compression come from the exporter's own variables, OTEL_EXPORTER_OTLP_*.
"""

from __future__ import annotations

import logging
import os
import time
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from antiphon.service.observability.background_writer import BackgroundWriter
from antiphon.service.observability.call import Call
from antiphon.service.observability.metric_families import MetricFamilies
from antiphon.service.observability.span_tree import SpanTree

log = logging.getLogger(__name__)

# How long a call may wait for others to be sent with it.
_GATHER_S = 1.0
_EXPORT_TIMEOUT_S = 10.0


class Spans:
    """A sink of calls; only those of a recorded trace are taken. `close` sends what is left."""

    def __init__(self, exporter: SpanExporter, families: MetricFamilies) -> None:
        self._exporter = exporter
        self._exported = families.spans_exported
        self._not_exported = families.spans_dropped.labels("not_exported")
        self._tree = SpanTree(_resource())
        on_drop = families.spans_dropped.labels("queue_full").inc
        self._calls = BackgroundWriter("antiphon-spans", self._send, on_drop=on_drop, gather_s=_GATHER_S)

    def __call__(self, call: Call) -> None:
        """Take a call that is over; at once."""
        if call.trace_id:
            self._calls.put((call, time.time() - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Send what was taken, for at most so many seconds. Blocks."""
        if not self._calls.close(timeout_s):
            log.warning("spans are left over: the collector takes none")
        self._exporter.shutdown()  # a send under way is given up

    def _send(self, batch: list[tuple[Call, float]]) -> None:
        spans = [span for call, wall_offset_s in batch for span in self._tree.spans(call, wall_offset_s)]
        is_taken = False
        try:
            is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        finally:
            (self._exported if is_taken else self._not_exported).inc(len(spans))


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
