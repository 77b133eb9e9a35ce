"""Names, help texts and buckets of all metrics. Metrics that vLLM has too have the same meaning.

Metrics of one model have the label model_name, as vLLM's families have. Its engine reports them through
`engine_metrics.py`, and they are removed with the model. No label grows with traffic.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from antiphon.observability.metrics.arena_metrics import ArenaMetrics
from antiphon.observability.metrics.model_families import MODEL_LABEL, PREFIX, ModelFamilies
from antiphon.observability.metrics.workspace_families import WorkspaceFamilies

# These models take 2-10 ms per token on a CPU.
TOKEN_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


class MetricFamilies:
    """All metrics of the server. Create one per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._in_flight()
        self._of_model = ModelFamilies(registry)
        self._requests()
        self._rpcs()
        self._background_writers()
        self._latencies()
        self._steps()
        self._cache()
        self.workspace = WorkspaceFamilies(self._of_model)
        self._memory()
        self.arenas = ArenaMetrics(PREFIX, MODEL_LABEL, registry)

    def remove(self, model_name: str) -> None:
        """Remove the metrics of one model. Later reports about it are not shown."""
        self._of_model.remove(model_name)
        self.arenas.remove_by_labels({MODEL_LABEL: model_name})

    def set_budget(self, num_bytes: int) -> None:
        """Report the memory budget. Without this call there is no such metric."""
        Gauge(f"{PREFIX}memory_budget_bytes", "Bytes that all models may hold together.", registry=self._registry).set(
            num_bytes
        )

    def set_machine(self, num_bytes: int) -> None:
        """Report the memory of the machine or container. Without this call there is no such metric."""
        Gauge(
            f"{PREFIX}machine_memory_bytes",
            "Memory that the process can use: its container's or the machine's, whichever is less.",
            registry=self._registry,
        ).set(num_bytes)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        """Read the delay of the event loop at every scrape."""
        Gauge(f"{PREFIX}event_loop_lag_seconds", "Delay of the event loop.", registry=self._registry).set_function(
            lag_s
        )

    def watch_connections(self, is_full: Callable[[], bool]) -> None:
        """Read at every scrape whether the gRPC port has its largest number of connections."""
        Gauge(
            f"{PREFIX}connections_full",
            "1 while the gRPC port has its largest number of connections; further ones are closed at once.",
            registry=self._registry,
        ).set_function(is_full)

    def certificate_expiry(self) -> Gauge:
        """Create the metric of the certificate's expiry. Without this call there is no such metric."""
        return Gauge(
            f"{PREFIX}tls_certificate_expiry_timestamp_seconds",
            "Expiry of the certificate that the ports present, in Unix time.",
            registry=self._registry,
        )

    def _requests(self) -> None:
        self.num_requests_waiting = self._of_model.gauge("num_requests_waiting", "Requests in the queue.")
        self.num_tokens_waiting = self._of_model.gauge(
            "num_tokens_waiting", "Source tokens of the requests in the queue."
        )
        self.num_requests_preempted = self._of_model.gauge(
            "num_requests_preempted", "Requests in the queue that were preempted."
        )
        self.preemptions = self._of_model.counter(
            "preemptions", "Times that a running output lost its row or its blocks to others, to continue later."
        )
        self.expected_wait = self._of_model.gauge(
            "expected_wait_seconds", "Estimated time to serve all requests in the queue; not a number while unknown."
        )
        self.num_requests_running = self._of_model.gauge("num_requests_running", "Requests being generated.")
        self.requests_submitted = self._of_model.counter(
            "requests_submitted", "Requests that the engine accepted, by task and priority.", "task", "priority"
        )
        self.request_success = self._of_model.counter(
            "request_success", "Requests answered in full, by finish reason.", "finished_reason"
        )
        self.request_errors = self._of_model.counter(
            "request_errors", "Requests ended by a fault or a shutdown.", "stage"
        )
        self.requests_refused = self._of_model.counter(
            "requests_refused",
            "RPCs refused, by ErrorInfo reason; model_name is empty if no model was found.",
            "reason",
        )
        self.cancellations = self._of_model.counter(
            "cancellations",
            "Requests cancelled, by cause and stage: waiting, encoding, running; streaming: answered, but not read.",
            "stage",
            "cause",
        )
        self.deadline_misses = self._of_model.counter(
            "deadline_misses", "Requests whose deadline passed, by stage: submit, or those of cancellations.", "stage"
        )

    def _in_flight(self) -> None:
        # First, because a scrape runs beside the event loop and reads the families in this order: if it shows no RPC in
        # flight, its counters include every RPC that ended.
        self.rpcs_in_flight = Gauge(
            f"{PREFIX}grpc_server_in_flight",
            "RPCs from their headers until their status is written; each request of a stream counts as one too.",
            registry=self._registry,
        )

    def _rpcs(self) -> None:
        self.rpcs_handled = Counter(
            f"{PREFIX}grpc_server_handled",
            "Finished RPCs, by full method and status code.",
            ("method", "code"),
            registry=self._registry,
        )
        self.calls_waiting = Gauge(
            f"{PREFIX}calls_waiting_for_client",
            "Calls that wait for their client, by stage: to send a request, to read an answer, or in an idle stream.",
            ("stage",),
            registry=self._registry,
        )
        self.unsent_bytes = Gauge(
            f"{PREFIX}unsent_answer_bytes", "Memory of answers that clients have not read.", registry=self._registry
        )
        self.connections_closed = Counter(
            f"{PREFIX}connections_closed",
            "Connections closed because their client reset most of its calls at once.",
            registry=self._registry,
        )
        self.calls_given_up = Counter(
            f"{PREFIX}calls_given_up",
            "Calls ended because they waited for their client, by stage; cause: timeout, or pressure of other calls.",
            ("stage", "cause"),
            registry=self._registry,
        )
        self.stream_messages = self._of_model.counter("stream_messages", "Messages written to streams.")
        self.tls_reloads = Counter(
            f"{PREFIX}tls_reloads", "Reloads of changed certificates, by result.", ("result",), registry=self._registry
        )
        self.token_reloads = Counter(
            f"{PREFIX}token_reloads", "Reloads of changed token files, by result.", ("result",), registry=self._registry
        )

    def _background_writers(self) -> None:
        self.log_lines_dropped = Counter(
            f"{PREFIX}log_lines_dropped",
            "Log lines, mostly access lines, that were dropped because standard error was too slow or failed.",
            registry=self._registry,
        )
        self.spans_exported = Counter(
            f"{PREFIX}spans_exported", "Spans that the collector accepted.", registry=self._registry
        )
        self.spans_dropped = Counter(
            f"{PREFIX}spans_dropped",
            "Dropped, by reason: queue_full counts calls, not_exported spans that the collector did not accept.",
            ("reason",),
            registry=self._registry,
        )
        for reason in ("queue_full", "not_exported"):
            self.spans_dropped.labels(reason)

    def _latencies(self) -> None:
        self.time_to_first_token = self._of_model.histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", REQUEST_BUCKETS_S
        )
        self.inter_token_latency = self._of_model.histogram(
            "inter_token_latency_seconds", "Time from one token of a request to the next.", TOKEN_BUCKETS_S
        )
        self.e2e_request_latency = self._of_model.histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of a full answer.", REQUEST_BUCKETS_S
        )
        self.request_queue_time = self._of_model.histogram(
            "request_queue_time_seconds", "Time from arrival to joining the running batch.", REQUEST_BUCKETS_S
        )

    def _steps(self) -> None:
        self.engine_last_step_age = self._of_model.gauge(
            "engine_last_step_age_seconds", "Time since the current step began or was due; 0 if there is no work."
        )
        self.engine_stuck = self._of_model.gauge("engine_stuck", "1 while a step takes longer than watchdog_timeout_s.")
        self.prompt_tokens = self._of_model.counter("prompt_tokens", "Source tokens encoded, or prompt tokens read.")
        self.generation_tokens = self._of_model.counter(
            "generation_tokens", "Target tokens decoded, for all beams, end tokens included."
        )
        self.padding_tokens = self._of_model.counter("padding_tokens", "Tokens the encoder computed for padding.")
        self.encode_batch_size = self._of_model.histogram(
            "encode_batch_size", "Sources in an encoder run.", ROW_BUCKETS
        )
        self.decode_batch_size = self._of_model.histogram(
            "decode_batch_size", "Rows in a decoder step: a beam or a sample each.", ROW_BUCKETS
        )
        self.empty_row_seconds = self._of_model.counter(
            "empty_row_seconds", "Time for which rows stood empty while requests waited: rows times seconds."
        )

    def _cache(self) -> None:
        self.kv_cache_usage = self._of_model.gauge("kv_cache_usage_ratio", "Share of the cache blocks in use, 0 to 1.")
        self.kv_cache_blocks = self._of_model.gauge(
            "kv_cache_blocks", "Cache blocks kept for self-attention, for cross-attention, and free.", "use"
        )
        self.kv_cache_bytes = self._of_model.gauge(
            "kv_cache_bytes", "Cache bytes kept for self-attention, for cross-attention, and free.", "use"
        )

    def _memory(self) -> None:
        self.model_info = self._of_model.gauge(
            "model_info",
            "Precision, lowering and architecture of a model; always 1.",
            "precision",
            "lowering",
            "architecture",
        )
        self.model_memory = self._of_model.gauge(
            "model_memory_bytes",
            "Bytes of a model: weights, cache, workspace; in the memory budget, or of a GPU.",
            "kind",
        )
