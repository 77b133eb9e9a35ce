"""How busy this server is, as ORCA tells it (gRFC A51): for clients and proxies that send more to who has less to do.

With every RPC in the trailer endpoint-load-metrics-bin, and out of band in xds.service.orca.v3.OpenRcaService. A report
is made at most ten times a second and kept as bytes: a trailer costs no more than its transport.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from google.protobuf.message_factory import GetMessageClass
from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport
from xds.service.orca.v3 import orca_pb2

from antiphon.service.domain.errors import InvalidArgument, Status
from antiphon.service.engine.engine import Engine
from antiphon.service.observability.call import Call
from antiphon.service.observability.telemetry import Context
from antiphon.service.rpc.calls.method_handlers import handler
from antiphon.service.rpc.calls.parsing import parser
from antiphon.service.rpc.calls.rpc import InFlight
from antiphon.service.rpc.v1.models import Models
from antiphon.service.server.machine import ResidentMemory
from antiphon.service.server.settings import usable_cores

SERVICE = orca_pb2.DESCRIPTOR.services_by_name["OpenRcaService"]
SERVICE_NAME: str = SERVICE.full_name
TRAILER_KEY = "endpoint-load-metrics-bin"

_MAX_AGE_S = 0.1
# Rates and CPU are averages that forget half of the past in this time.
_HALF_LIFE_S = 2.0
# Ends that would be this server's fault, or its load's: a client's own mistakes are none.
_ERRORS = {
    status.name for status in (Status.INTERNAL, Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED)
} | {"UNKNOWN"}


class _Average:
    """Of a rate: what happened in a second, with the past fading away."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def add(self, amount: float, elapsed_s: float) -> None:
        kept = 0.5 ** (elapsed_s / _HALF_LIFE_S)
        self.per_s = kept * self.per_s + (1 - kept) * amount / elapsed_s


class LoadReports:
    """Reports of all models' engines together. For the event loop. clock, cpu_clock: seconds; of time, of CPU used."""

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
        self._memory_bytes = _usable_memory_bytes()
        self._made_s, self._cpu_s = clock(), cpu_clock()
        self._num_calls = self._num_errors = 0
        self._calls, self._errors, self._cpu = _Average(), _Average(), _Average()
        self._packed: bytes | None = None

    def trailer(self, call: Call) -> tuple[str, bytes]:
        """The trailer of an RPC that ends now, which is counted."""
        self._num_calls += 1
        self._num_errors += call.code in _ERRORS
        return TRAILER_KEY, self.packed()

    def packed(self) -> bytes:
        """A serialised OrcaLoadReport, at most 100 ms old."""
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
    """The RPC method of OpenRcaService. min_interval_s: reports of one call come no faster."""

    def __init__(self, reports: LoadReports, min_interval_s: float) -> None:
        self._reports = reports
        self._min_interval_s = min_interval_s

    def handler(self, in_flight: InFlight) -> grpc.GenericRpcHandler:
        """Handlers of the service, for `add_generic_rpc_handlers`; no drain waits for its RPCs."""
        name = "StreamCoreMetrics"
        parse = parser(GetMessageClass(SERVICE.methods_by_name[name].input_type))
        guarded = in_flight.apart().guard_open(f"{SERVICE_NAME}/{name}", self.stream_core_metrics, parse)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {name: handler(guarded, is_streaming=True)})

    async def stream_core_metrics(self, message: orca_pb2.OrcaLoadReportRequest, context: Context) -> None:
        """Send a report now and after every interval, for as long as the client listens."""
        interval_s = message.report_interval.seconds + message.report_interval.nanos / 1e9
        if interval_s < 0:
            raise InvalidArgument("report_interval", f"{interval_s} s", "0 s or more")
        while True:
            await context.write(OrcaLoadReport.FromString(self._reports.packed()))
            await asyncio.sleep(max(interval_s, self._min_interval_s))


def _cache_usage(engine: Engine) -> float:
    """Share of the cache blocks that are kept for requests, 0 to 1."""
    return (engine.num_blocks - engine.num_free_blocks) / max(1, engine.num_blocks)


def _occupation(engine: Engine) -> float:
    """How full an engine is: 1 where it can run no more at once; above it where requests wait for that."""
    return max((engine.num_running + engine.num_waiting) / engine.max_num_seqs, _cache_usage(engine))


def _usable_memory_bytes() -> float:
    """Bytes this process may hold: the machine's, or the container's limit where it is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(machine, math.inf if limit == "max" else int(limit))
    except (OSError, ValueError):  # no cgroup v2
        return machine
