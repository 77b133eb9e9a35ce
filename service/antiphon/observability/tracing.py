"""Spans of finished calls: the RPC, and for each of its requests queue, encode, decode and stream; sent over OTLP.

Never delays a call: spans that the collector does not accept are dropped and counted. Imports opentelemetry (the
extra `trace`), so code that runs without it must not import this module. Spans contain no text and no tokens.
Attributes: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/ and, for tokens, .../semconv/gen-ai/.
The exporter's own variables, OTEL_EXPORTER_OTLP_*, set headers, certificates and compression.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from antiphon.observability.background_writer import BackgroundWriter
from antiphon.observability.call import AdmittedRequest, CallRecord
from antiphon.observability.metrics import MetricFamilies

log = logging.getLogger(__name__)

# Time in which further calls are collected to be sent together.
_GATHER_S = 1.0
_EXPORT_TIMEOUT_S = 10.0

_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("antiphon")
# Status codes that the conventions count as server errors; the others are client errors.
_SERVER_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}

Attributes = dict[str, str | int | float]


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


@dataclass(frozen=True, slots=True)
class Part:
    """Phase of a request, in seconds of the server's clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    first_token_s: float | None = None


class SpanTree:
    """Creates the spans of calls. resource: entity that produces them."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._random = random.Random()

    def spans(self, call: CallRecord, wall_offset_s: float) -> Iterator[ReadableSpan]:
        """Yield the RPC's span, then its parts. wall_offset_s: time since 1970 minus the server's clock."""
        assert call.trace is not None
        assert call.ended_s is not None
        trace_id = int(call.trace.trace_id, 16)
        parent = _context(trace_id, int(call.trace.parent_id, 16), is_remote=True) if call.trace.parent_id else None
        context = _context(trace_id, self._new_id())
        rpc = Part(call.method, call.arrival_s, call.ended_s, _rpc_attributes(call))
        yield self._span(rpc, context, parent, wall_offset_s, kind=SpanKind.SERVER, status=_status(call))
        for admitted in call.requests:
            for part in parts_of(admitted, call):
                yield self._span(part, _context(trace_id, self._new_id()), context, wall_offset_s)

    def _new_id(self) -> int:
        return self._random.getrandbits(64) or 1

    def _span(
        self,
        part: Part,
        context: SpanContext,
        parent: SpanContext | None,
        wall_offset_s: float,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
    ) -> ReadableSpan:
        def nanos(seconds: float) -> int:
            return round((seconds + wall_offset_s) * 1e9)

        events = () if part.first_token_s is None else (Event("first_token", timestamp=nanos(part.first_token_s)),)
        return ReadableSpan(
            name=part.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=part.attributes,
            events=events,
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=nanos(part.start_s),
            end_time=nanos(part.end_s),
            instrumentation_scope=_SCOPE,
        )


def parts_of(admitted: AdmittedRequest, call: CallRecord) -> Iterator[Part]:
    """Yield the phases of a request in order, without those that it did not reach."""
    request, timing = admitted.request, admitted.timing
    assert timing is not None
    arrival_s = request.arrival_s
    end_s = arrival_s + timing.total_s
    queued_s = end_s if timing.queued_s is None else arrival_s + timing.queued_s
    yield Part("queue", arrival_s, queued_s, {"antiphon.priority": request.priority.value})
    if timing.queued_s is None:
        return
    encoded_s = queued_s
    if request.source_ids:
        encoded_s = end_s if timing.encoded_s is None else arrival_s + timing.encoded_s
        yield Part("encode", queued_s, encoded_s, {"gen_ai.usage.input_tokens": request.num_source_tokens})
    first_s = None if timing.first_token_s is None else arrival_s + timing.first_token_s
    if request.has_target and encoded_s < end_s:
        yield Part("decode", encoded_s, end_s, _decode_attributes(admitted), first_s)
    if request.is_streamed and first_s is not None:
        last_s = max(first_s, end_s if call.ended_s is None else call.ended_s)
        yield Part("stream", first_s, last_s, {"antiphon.stream.messages": call.num_messages})


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _FLAGS)


def _decode_attributes(admitted: AdmittedRequest) -> Attributes:
    return {
        "gen_ai.usage.output_tokens": admitted.num_generated,
        "antiphon.finish_reasons": ",".join(reason.value for reason in admitted.finish_reasons),
    }


def _rpc_attributes(call: CallRecord) -> Attributes:
    service, _, method = call.method.partition("/")
    attributes: Attributes = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": grpc.StatusCode[call.code].value[0],
        "antiphon.request_id": call.request_id,
        "antiphon.caller": call.caller,
    }
    if call.model_name:
        attributes["gen_ai.request.model"] = call.model_name
    if call.error is not None:
        attributes["error.type"] = call.error.reason
    causes = [cause.value for admitted in call.requests if (cause := admitted.stream.cancel_cause) is not None]
    if causes:
        attributes["antiphon.cancel_cause"] = causes[0]
    return attributes


def _status(call: CallRecord) -> Status:
    """Return the span's status, without the client's message: it may quote the request."""
    if call.code not in _SERVER_ERRORS:
        return Status(StatusCode.UNSET)
    return Status(StatusCode.ERROR, call.code if call.error is None else call.error.reason)
