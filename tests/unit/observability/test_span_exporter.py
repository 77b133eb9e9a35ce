"""Export of spans beside a collector that fails, with a real thread and the exporter's own interface."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from antiphon.observability.call import CallRecord, TraceContext
from antiphon.observability.metrics import MetricFamilies
from antiphon.observability.tracing import Spans

TIMEOUT_S = 30.0


class Stuck(SpanExporter):
    """Exporter whose export lasts until its shutdown, and then raises, as gRPC does for a closed channel."""

    def __init__(self) -> None:
        self.has_begun, self.is_shut_down = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        assert self.is_shut_down.wait(TIMEOUT_S)
        raise ValueError("Cannot invoke RPC on closed channel!")

    def shutdown(self) -> None:
        self.is_shut_down.set()


def finished_call() -> CallRecord:
    trace = TraceContext(trace_id="0" * 31 + "1", parent_id="0" * 15 + "2", is_sampled=True)
    call = CallRecord(method="Test/Embed", request_id="a", arrival_s=0.0, trace=trace)
    call.ended_s, call.code = 1.0, "OK"
    return call


def test_export_that_shutdown_cancels_is_counted_and_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the exporter raised during shutdown, and its stack was printed as an error of the server."""
    registry, exporter = CollectorRegistry(), Stuck()
    spans = Spans(exporter, MetricFamilies(registry))
    spans(finished_call())
    assert exporter.has_begun.wait(TIMEOUT_S)
    spans.close(0.0)
    spans._calls._thread.join(TIMEOUT_S)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert registry.get_sample_value("antiphon_spans_dropped_total", {"reason": "not_exported"}) == 1
