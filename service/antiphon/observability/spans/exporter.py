"""Sends the spans of calls to an OpenTelemetry collector, over OTLP and gRPC, in a separate thread.

Never delays a call: spans that the collector does not accept are dropped and counted. Imports opentelemetry, as
span_tree.py does. The exporter's own variables, OTEL_EXPORTER_OTLP_*, set headers, certificates and compression.
"""

from __future__ import annotations

import logging
import os
import time
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from antiphon.observability.background_writer import BackgroundWriter
from antiphon.observability.call import CallRecord
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.observability.spans.span_tree import SpanTree

log = logging.getLogger(__name__)

# Time in which further calls are collected to be sent together.
_GATHER_S = 1.0
_EXPORT_TIMEOUT_S = 10.0


class Spans:
    """Sink that sends the calls of recorded traces. `close` sends the remaining ones."""

    def __init__(self, exporter: SpanExporter, families: MetricFamilies) -> None:
        self._exporter = exporter
        self._exported = families.spans_exported
        self._not_exported = families.spans_dropped.labels("not_exported")
        self._tree = SpanTree(_resource())
        on_drop = families.spans_dropped.labels("queue_full").inc
        self._is_shut_down = False
        self._calls = BackgroundWriter("antiphon-spans", self._send, on_drop=on_drop, gather_s=_GATHER_S)

    def __call__(self, call: CallRecord) -> None:
        """Queue a finished call; never blocks."""
        if call.trace_id:
            self._calls.put((call, time.time() - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Send the queued calls, for at most timeout_s. Blocks."""
        if not self._calls.close(timeout_s):
            log.warning("some spans were not sent: the collector does not accept them")
        self._is_shut_down = True
        self._exporter.shutdown()  # cancels a running export

    def _send(self, batch: list[tuple[CallRecord, float]]) -> None:
        spans = [span for call, wall_offset_s in batch for span in self._tree.spans(call, wall_offset_s)]
        is_taken = False
        try:
            is_taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # an export that shutdown cancels may raise, because its channel is closed
            if not self._is_shut_down:
                raise
        finally:
            (self._exported if is_taken else self._not_exported).inc(len(spans))


def open_spans(endpoint: str, families: MetricFamilies) -> Spans:
    """Send spans to a collector at http://host:port, or with TLS at https://host:port."""
    return Spans(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S), families)


def _resource() -> Resource:
    """Return the resource of the spans. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, if set, extend it."""
    name = os.environ.get("OTEL_SERVICE_NAME") or "antiphon"
    try:
        version = metadata.version("antiphon")
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        version = "unknown"
    return Resource.create({"service.name": name, "service.version": version})
