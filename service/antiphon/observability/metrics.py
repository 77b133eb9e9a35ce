"""Metrics of the server and of its process: one row for each family. Metrics that vLLM has too have the same meaning.

Metrics of one model have the label model_name, as vLLM's families have. Its engine reports them through
`engine_metrics.py`, and they are removed with the model. No label grows with traffic.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata

from prometheus_client import CollectorRegistry, Gauge, GCCollector, Info, PlatformCollector, ProcessCollector

from antiphon.observability.families import (
    PREFIX,
    Families,
    Merge,
    counter,
    gauge,
    model_counter,
    model_gauge,
    model_histogram,
)
from antiphon.observability.workspace_metrics import ARENA_MERGE_RULES, ArenaMetrics, WorkspaceFamilies

# These models take 2-10 ms per token on a CPU.
TOKEN_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


class MetricFamilies(Families):
    """All metrics of the server. Create one per registry."""

    # First, because a scrape runs beside the event loop and reads the families in this order: if it shows no RPC in
    # flight, its counters include every RPC that ended.
    rpcs_in_flight = gauge(
        "grpc_server_in_flight",
        "RPCs from their headers until their status is written; each request of a stream counts as one too.",
        Merge.SUM,
    )

    # Requests. Alerts and autoscalers compare some gauges with limits; of those, the worst process counts: MAX.
    num_requests_waiting = model_gauge("num_requests_waiting", "Requests in the queue.", Merge.SUM)
    num_tokens_waiting = model_gauge("num_tokens_waiting", "Source tokens of the requests in the queue.", Merge.SUM)
    num_requests_preempted = model_gauge(
        "num_requests_preempted", "Requests in the queue that were preempted.", Merge.SUM
    )
    preemptions = model_counter(
        "preemptions", "Times that a running output lost its row or its blocks to others, to continue later."
    )
    expected_wait = model_gauge(
        "expected_wait_seconds",
        "Estimated time to serve all requests in the queue; not a number while unknown.",
        Merge.MAX,
    )
    num_requests_running = model_gauge("num_requests_running", "Requests being generated.", Merge.SUM)
    requests_submitted = model_counter(
        "requests_submitted", "Requests that the engine accepted, by task and priority.", "task", "priority"
    )
    request_success = model_counter(
        "request_success", "Requests answered in full, by finish reason.", "finished_reason"
    )
    request_errors = model_counter("request_errors", "Requests ended by a fault or a shutdown.", "stage")
    requests_refused = model_counter(
        "requests_refused", "RPCs refused, by ErrorInfo reason; model_name is empty if no model was found.", "reason"
    )
    cancellations = model_counter(
        "cancellations",
        "Requests cancelled, by cause and stage: waiting, encoding, running; streaming: answered, but not read.",
        "stage",
        "cause",
    )
    deadline_misses = model_counter(
        "deadline_misses", "Requests whose deadline passed, by stage: submit, or those of cancellations.", "stage"
    )

    # RPCs and connections.
    rpcs_handled = counter("grpc_server_handled", "Finished RPCs, by full method and status code.", "method", "code")
    calls_waiting = gauge(
        "calls_waiting_for_client",
        "Calls that wait for their client, by stage: to send a request, to read an answer, or in an idle stream.",
        Merge.SUM,
        "stage",
    )
    unsent_bytes = gauge("unsent_answer_bytes", "Memory of answers that clients have not read.", Merge.SUM)
    connections_closed = counter(
        "connections_closed", "Connections closed because their client reset most of its calls at once."
    )
    calls_given_up = counter(
        "calls_given_up",
        "Calls ended because they waited for their client, by stage; cause: timeout, or pressure of other calls.",
        "stage",
        "cause",
    )
    stream_messages = model_counter("stream_messages", "Messages written to streams.")
    tls_reloads = counter("tls_reloads", "Reloads of changed certificates, by result.", "result")
    token_reloads = counter("token_reloads", "Reloads of changed token files, by result.", "result")

    # Logs and spans.
    log_lines_dropped = counter(
        "log_lines_dropped",
        "Log lines, mostly access lines, that were dropped because standard error was too slow or failed.",
    )
    spans_exported = counter("spans_exported", "Spans that the collector accepted.")
    spans_dropped = counter(
        "spans_dropped",
        "Dropped, by reason: queue_full counts calls, not_exported spans that the collector did not accept.",
        "reason",
    )

    # Latencies.
    time_to_first_token = model_histogram(
        "time_to_first_token_seconds", "Time from arrival to the first token.", REQUEST_BUCKETS_S
    )
    inter_token_latency = model_histogram(
        "inter_token_latency_seconds", "Time from one token of a request to the next.", TOKEN_BUCKETS_S
    )
    e2e_request_latency = model_histogram(
        "e2e_request_latency_seconds", "Time from arrival to the end of a full answer.", REQUEST_BUCKETS_S
    )
    request_queue_time = model_histogram(
        "request_queue_time_seconds", "Time from arrival to joining the running batch.", REQUEST_BUCKETS_S
    )

    # Steps of the engine.
    engine_last_step_age = model_gauge(
        "engine_last_step_age_seconds",
        "Time since the current step began or was due; 0 if there is no work.",
        Merge.MAX,
    )
    engine_stuck = model_gauge("engine_stuck", "1 while a step takes longer than watchdog_timeout_s.", Merge.MAX)
    prompt_tokens = model_counter("prompt_tokens", "Source tokens encoded, or prompt tokens read.")
    generation_tokens = model_counter("generation_tokens", "Target tokens decoded, for all beams, end tokens included.")
    padding_tokens = model_counter("padding_tokens", "Tokens the encoder computed for padding.")
    encode_batch_size = model_histogram("encode_batch_size", "Sources in an encoder run.", ROW_BUCKETS)
    decode_batch_size = model_histogram(
        "decode_batch_size", "Rows in a decoder step: a beam or a sample each.", ROW_BUCKETS
    )
    empty_row_seconds = model_counter(
        "empty_row_seconds", "Time for which rows stood empty while requests waited: rows times seconds."
    )

    # Memory and machine.
    kv_cache_usage = model_gauge("kv_cache_usage_ratio", "Share of the cache blocks in use, 0 to 1.", Merge.MAX)
    kv_cache_blocks = model_gauge(
        "kv_cache_blocks", "Cache blocks kept for self-attention, for cross-attention, and free.", Merge.SUM, "use"
    )
    kv_cache_bytes = model_gauge(
        "kv_cache_bytes", "Cache bytes kept for self-attention, for cross-attention, and free.", Merge.SUM, "use"
    )
    model_info = model_gauge(
        "model_info",
        "Precision, lowering and architecture of a model; always 1.",
        Merge.MAX,
        "precision",
        "lowering",
        "architecture",
    )
    model_memory = model_gauge(
        "model_memory_bytes",
        "Bytes of a model: weights, cache, workspace; in the memory budget, or of a GPU.",
        Merge.MAX,
        "kind",
    )
    _memory_budget = gauge(
        "memory_budget_bytes", "Bytes that all models may hold together.", Merge.MAX, is_on_demand=True
    )
    _machine_memory = gauge(
        "machine_memory_bytes",
        "Memory that the process can use: its container's or the machine's, whichever is less.",
        Merge.MAX,
        is_on_demand=True,
    )
    _event_loop_lag = gauge("event_loop_lag_seconds", "Delay of the event loop.", Merge.EACH, is_on_demand=True)
    _connections_full = gauge(
        "connections_full",
        "1 while the gRPC port has its largest number of connections; further ones are closed at once.",
        Merge.MAX,
        is_on_demand=True,
    )
    _certificate_expiry = gauge(
        "tls_certificate_expiry_timestamp_seconds",
        "Expiry of the certificate that the ports present, in Unix time.",
        Merge.MIN,
        is_on_demand=True,
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        for reason in ("queue_full", "not_exported"):
            self.spans_dropped.labels(reason)
        self.workspace = WorkspaceFamilies(registry)
        self.arenas = ArenaMetrics(registry)

    def remove(self, model_name: str) -> None:
        """Remove the metrics of one model. Later reports about it are not shown."""
        super().remove(model_name)
        self.workspace.remove(model_name)
        self.arenas.remove(model_name)

    def set_budget(self, num_bytes: int) -> None:
        """Report the memory budget. Without this call there is no such metric."""
        self._memory_budget.set(num_bytes)

    def set_machine(self, num_bytes: int) -> None:
        """Report the memory of the machine or container. Without this call there is no such metric."""
        self._machine_memory.set(num_bytes)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        """Read the delay of the event loop at every scrape."""
        self._event_loop_lag.set_function(lag_s)

    def watch_connections(self, is_full: Callable[[], bool]) -> None:
        """Read at every scrape whether the gRPC port has its largest number of connections."""
        self._connections_full.set_function(is_full)

    def certificate_expiry(self) -> Gauge:
        """Return the metric of the certificate's expiry. Without this call there is no such metric."""
        return self._certificate_expiry


class WorkerMetrics(Families):
    """Metrics of a supervisor: how many workers serve, and how often one was replaced."""

    _restarts = counter("worker_restarts", "Workers started in place of others.")
    _configured = gauge("workers_configured", "Workers that the server should have.", Merge.SUM)
    _serving = gauge("workers_serving", "Workers that accept requests.", Merge.SUM)

    def __init__(self, registry: CollectorRegistry, num_workers: int, num_serving: Callable[[], int]) -> None:
        super().__init__(registry)
        self._configured.set(num_workers)
        self._serving.set_function(num_serving)

    def restarted(self) -> None:
        """Count a worker that takes the place of another."""
        self._restarts.inc()


_PACKAGES = {"version": "antiphon", "onnxruntime": "onnxruntime", "grpcio": "grpcio", "protobuf": "protobuf"}
_PROCESS_MERGE_RULES = {
    f"{PREFIX}build_info": Merge.MAX,
    "process_virtual_memory_bytes": Merge.EACH,
    "process_resident_memory_bytes": Merge.SUM,  # the supervisor replaces it: processes share pages
    "process_start_time_seconds": Merge.EACH,
    "process_open_fds": Merge.EACH,
    "process_max_fds": Merge.EACH,
}


def add_process_metrics(registry: CollectorRegistry) -> None:
    """Register resident memory, CPU time, open files, Python's garbage collector, and the versions of this build."""
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info(f"{PREFIX}build", "Versions of this server and its main packages; always 1.", registry=registry)
    build.info({name: _version(package) for name, package in _PACKAGES.items()} | {"python": platform.python_version()})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a checkout that is not installed, or ONNX Runtime for GPUs
        return "unknown"


MERGE_RULES: Mapping[str, Merge] = {
    **MetricFamilies.merge_rules(),
    **WorkspaceFamilies.merge_rules(),
    **ARENA_MERGE_RULES,
    **WorkerMetrics.merge_rules(),
    **_PROCESS_MERGE_RULES,
}
"""Rule of each gauge by its name. Families of other packages, which have none, are the same in all processes."""
