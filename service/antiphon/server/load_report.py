"""Load of this server as ORCA reports (gRFC A51), for clients and proxies that balance load.

Every RPC has a report in the trailer endpoint-load-metrics-bin; xds.service.orca.v3.OpenRcaService sends them out of
band. A report is created at most ten times a second and kept as bytes, so a trailer costs only its transport.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import grpc
from google.protobuf.message_factory import GetMessageClass
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3 import orca_pb2

from antiphon.domain.errors import InvalidArgument, Status
from antiphon.engine.remote import AnyEngine
from antiphon.observability.call import CallRecord
from antiphon.rpc.context import RequestContext
from antiphon.rpc.endpoints import grpc_handler, idle_stream
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.parsing import parser
from antiphon.rpc.v1.models import Models
from antiphon.server.machine import ResidentMemory, memory_bytes, usable_cores

SERVICE = orca_pb2.DESCRIPTOR.services_by_name["OpenRcaService"]
SERVICE_NAME: str = SERVICE.full_name
TRAILER_KEY = "endpoint-load-metrics-bin"

_MAX_AGE_S = 0.1
# Half-life of the moving averages of rates and CPU time.
_HALF_LIFE_S = 2.0
# Status codes caused by this server or its load, not by a client's mistake.
_ERRORS = {
    status.name for status in (Status.INTERNAL, Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED)
} | {"UNKNOWN"}


class _Average:
    """Exponential moving average of a rate per second."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def add(self, amount: float, elapsed_s: float) -> None:
        kept = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self.per_s = kept * self.per_s + (1 - kept) * amount / elapsed_s


class LoadReports:
    """Reports over the engines of all models. For the event loop. clock, cpu_clock: seconds of time and of CPU time."""

    def __init__(
        self,
        models: Models,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._models = models
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._cores = usable_cores()
        self._resident = ResidentMemory()
        self._memory_bytes = memory_bytes() or math.inf
        self._made_s, self._cpu_s = clock(), cpu_clock()
        self._num_calls = self._num_errors = 0
        self._calls, self._errors, self._cpu = _Average(), _Average(), _Average()
        self._packed: bytes | None = None

    def trailer(self, call: CallRecord) -> tuple[str, bytes]:
        """Count an RPC that ends now, and return its trailer."""
        self._num_calls += 1
        self._num_errors += call.code in _ERRORS
        return TRAILER_KEY, self.packed()

    def packed(self) -> bytes:
        """Return a serialised OrcaLoadReport that is at most 100 ms old."""
        elapsed_s = self._clock() - self._made_s
        if self._packed is None or elapsed_s >= _MAX_AGE_S:
            self._packed = self._report(elapsed_s).SerializeToString()
        return self._packed

    def _report(self, elapsed_s: float) -> OrcaLoadReport:
        if elapsed_s >= _MAX_AGE_S:
            self._advance(elapsed_s)
        engines = [served.engine for served in self._models]
        cache_usage = max((_cache_usage(engine) for engine in engines), default=0.0)
        return OrcaLoadReport(
            cpu_utilization=self._cpu.per_s / self._cores,
            mem_utilization=self._resident.num_bytes() / self._memory_bytes,
            application_utilization=max((_occupation(engine) for engine in engines), default=0.0),
            rps_fractional=self._calls.per_s,
            eps=self._errors.per_s,
            utilization={"kv_cache_usage": cache_usage},
            named_metrics={
                "kv_cache_usage": cache_usage,
                "num_requests_running": sum(engine.num_running for engine in engines),
                "num_requests_waiting": sum(engine.num_waiting for engine in engines),
            },
        )

    def _advance(self, elapsed_s: float) -> None:
        cpu_s = self._cpu_clock()
        self._cpu.add(cpu_s - self._cpu_s, elapsed_s)
        self._calls.add(self._num_calls, elapsed_s)
        self._errors.add(self._num_errors, elapsed_s)
        self._num_calls = self._num_errors = 0
        self._made_s += elapsed_s
        self._cpu_s = cpu_s


class LoadServicer:
    """RPC method of OpenRcaService. min_interval_s: shortest interval between the reports of one call."""

    def __init__(self, reports: LoadReports, min_interval_s: float) -> None:
        self._reports = reports
        self._min_interval_s = min_interval_s

    def handler(self, middleware: CallMiddleware) -> grpc.GenericRpcHandler:
        """Return the handlers of the service, for `add_generic_rpc_handlers`. A drain does not wait for its RPCs."""
        name = "StreamCoreMetrics"
        parse = parser(GetMessageClass(SERVICE.methods_by_name[name].input_type))
        guarded = middleware.apart().guard(f"{SERVICE_NAME}/{name}", idle_stream(self.stream_core_metrics, parse))
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {name: grpc_handler(guarded, is_streaming=True)})

    async def stream_core_metrics(self, message: orca_pb2.OrcaLoadReportRequest, context: RequestContext) -> None:
        """Send a report now and after every interval, until the client ends the call."""
        interval_s = message.report_interval.seconds + message.report_interval.nanos / 1e9
        if interval_s < 0:
            raise InvalidArgument("report_interval", f"{interval_s} s", "0 s or more")
        while True:
            await context.send(self._reports.packed())
            await asyncio.sleep(max(interval_s, self._min_interval_s))


def _cache_usage(engine: AnyEngine) -> float:
    """Return the share of the cache blocks in use by requests, 0 to 1."""
    return (engine.num_blocks - engine.num_free_blocks) / max(1, engine.num_blocks)


def _occupation(engine: AnyEngine) -> float:
    """Return the utilisation of an engine: 1 if it can run no further request, above 1 if requests wait."""
    return max((engine.num_running + engine.num_waiting) / engine.max_num_seqs, _cache_usage(engine))
