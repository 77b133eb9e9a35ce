"""An OpenTelemetry collector in this process that keeps the received spans."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 60


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Received spans and their resources."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self._came = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._came:
            for resource_spans in request.resource_spans:
                self.resource = attributes_of(resource_spans.resource)
                for scope_spans in resource_spans.scope_spans:
                    self.spans += scope_spans.spans
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, *request_ids: str) -> None:
        """Return when the span of each RPC has arrived."""
        with self._came:
            assert self._came.wait_for(lambda: {*request_ids} <= {*self.rpcs}, timeout=PATIENCE_S)

    @property
    def rpcs(self) -> dict[str, Span]:
        """Return the spans of RPCs by request id."""
        held = [(attributes_of(span), span) for span in self.spans]
        return {attributes["antiphon.request_id"]: span for attributes, span in held if "rpc.system" in attributes}

    def parts(self, rpc: Span) -> dict[str, Span]:
        """Return the children of a span by name."""
        return {span.name: span for span in self.spans if span.parent_span_id == rpc.span_id}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as Python values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}
