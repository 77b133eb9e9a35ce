"""Every metric's name, meaning and buckets, once. Meanings follow vLLM's where it has the metric.

What is of one model has the label model_name, as vLLM's families have: what its engine reports goes through its own
view (`metrics.py`), and goes away with it. Refuses labels that grow with traffic.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from antiphon.service.observability.arena_metrics import ArenaMetrics
from antiphon.service.observability.histogram import CountedHistogram

PREFIX = "antiphon_"
MODEL_LABEL = "model_name"

# A token takes these models 2-10 ms on a CPU.
TOKEN_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
WORKSPACE_BUCKETS_BYTES = tuple(4**power * 1024 for power in range(3, 13))  # 64 KiB to 16 GiB
# Of what was measured over what was predicted; no residual, for a bucket below 0 is not OpenMetrics.
QUOTIENT_BUCKETS = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


class MetricFamilies:
    """The server's metrics in a registry, for every model; one a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._all: list[Counter | Gauge | CountedHistogram | ArenaMetrics] = []
        self._requests()
        self._rpcs()
        self._background_writers()
        self._latencies()
        self._steps()
        self._cache()
        self._workspace()
        self._memory()
        self.arenas = ArenaMetrics(PREFIX, MODEL_LABEL, registry)
        self._all.append(self.arenas)

    def remove(self, model_name: str) -> None:
        """Forget everything that was reported of one model; what still reports of it is not seen."""
        for family in self._all:
            family.remove_by_labels({MODEL_LABEL: model_name})

    def set_budget(self, num_bytes: int) -> None:
        """Report the memory budget; without a call there is none, and no such metric."""
        Gauge(f"{PREFIX}memory_budget_bytes", "Bytes that all models may hold together.", registry=self._registry).set(
            num_bytes
        )

    def set_machine(self, num_bytes: int) -> None:
        """Report the memory that there is; without a call it is not known, and no such metric."""
        Gauge(
            f"{PREFIX}machine_memory_bytes",
            "Memory that the process may come to use: its container's, or the machine's where that is less.",
            registry=self._registry,
        ).set(num_bytes)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        """Read how late the event loop is, at every scrape."""
        Gauge(
            f"{PREFIX}event_loop_lag_seconds", "By how much the event loop is late.", registry=self._registry
        ).set_function(lag_s)

    def watch_connections(self, is_full: Callable[[], bool]) -> None:
        """Read whether the gRPC port has as many connections as it may, at every scrape."""
        Gauge(
            f"{PREFIX}connections_full",
            "1 while the gRPC port has as many connections as it may; further ones are closed at once.",
            registry=self._registry,
        ).set_function(is_full)

    def certificate_expiry(self) -> Gauge:
        """When the certificate in use expires; without a call there is none, and no such metric."""
        return Gauge(
            f"{PREFIX}tls_certificate_expiry_timestamp_seconds",
            "When the certificate that the ports show expires, in Unix time.",
            registry=self._registry,
        )

    def _requests(self) -> None:
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.num_tokens_waiting = self._gauge("num_tokens_waiting", "Source tokens of the requests in the queue.")
        self.num_requests_preempted = self._gauge(
            "num_requests_preempted", "Of the requests in the queue, those that ran before."
        )
        self.preemptions = self._counter(
            "preemptions", "Times that a running output gave its row or its blocks to others, to go on later."
        )
        self.expected_wait = self._gauge(
            "expected_wait_seconds", "How long it would take to serve all in the queue; not a number while unknown."
        )
        self.num_requests_running = self._gauge("num_requests_running", "Requests being generated.")
        self.requests_submitted = self._counter(
            "requests_submitted", "Requests that the engine took up, by what they ask for.", "task", "priority"
        )
        self.request_success = self._counter(
            "request_success", "Requests answered in full, by how the output ended.", "finished_reason"
        )
        self.request_errors = self._counter("request_errors", "Requests ended by a fault or a shutdown.", "stage")
        self.requests_refused = self._counter(
            "requests_refused", "RPCs refused, by ErrorInfo reason; model_name is empty where none was found.", "reason"
        )
        self.cancellations = self._counter(
            "cancellations",
            "Requests given up, by why and where: waiting, encoding, running; streaming: answered, but not read.",
            "stage",
            "cause",
        )
        self.deadline_misses = self._counter(
            "deadline_misses", "Requests whose deadline passed: at submit, or in a stage of cancellations.", "stage"
        )

    def _rpcs(self) -> None:
        self.rpcs_handled = Counter(
            f"{PREFIX}grpc_server_handled",
            "RPCs that are over, by full method and status code.",
            ("method", "code"),
            registry=self._registry,
        )
        self.rpcs_in_flight = Gauge(
            f"{PREFIX}grpc_server_in_flight",
            "RPCs from their headers until their status is written, and requests of a stream of them, each.",
            registry=self._registry,
        )
        self.calls_waiting = Gauge(
            f"{PREFIX}calls_waiting_for_client",
            "Calls that wait for their client: to send its request, to read its answer, or in a stream that may idle.",
            ("stage",),
            registry=self._registry,
        )
        self.unsent_bytes = Gauge(
            f"{PREFIX}unsent_answer_bytes", "Bytes of answers that clients have not read.", registry=self._registry
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
        self.stream_messages = self._counter("stream_messages", "Messages written to streams.")
        self.tls_reloads = Counter(
            f"{PREFIX}tls_reloads", "Changed certificates read again, by result.", ("result",), registry=self._registry
        )
        self.token_reloads = Counter(
            f"{PREFIX}token_reloads", "Changed token files read again, by result.", ("result",), registry=self._registry
        )

    def _background_writers(self) -> None:
        self.log_lines_dropped = Counter(
            f"{PREFIX}log_lines_dropped",
            "Lines of the log, access lines above all, that standard error took too late, or refused.",
            registry=self._registry,
        )
        self.spans_exported = Counter(
            f"{PREFIX}spans_exported", "Spans that the collector took.", registry=self._registry
        )
        self.spans_dropped = Counter(
            f"{PREFIX}spans_dropped",
            "What the collector was not told, by why: calls that found the queue full, spans that it did not take.",
            ("reason",),
            registry=self._registry,
        )
        for reason in ("queue_full", "not_exported"):
            self.spans_dropped.labels(reason)

    def _latencies(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", REQUEST_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "From one token of a request to its next.", TOKEN_BUCKETS_S
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a full answer.", REQUEST_BUCKETS_S
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to joining the running batch.", REQUEST_BUCKETS_S
        )

    def _steps(self) -> None:
        self.engine_last_step_age = self._gauge(
            "engine_last_step_age_seconds", "Since the step under way began, or should have; 0 where nothing is to do."
        )
        self.engine_stuck = self._gauge("engine_stuck", "1 while a step takes longer than watchdog_timeout_s.")
        self.prompt_tokens = self._counter("prompt_tokens", "Source tokens encoded, or prompt tokens read.")
        self.generation_tokens = self._counter(
            "generation_tokens", "Target tokens decoded, end tokens included, those of every beam."
        )
        self.padding_tokens = self._counter("padding_tokens", "Tokens the encoder computed for padding.")
        self.encode_batch_size = self._histogram("encode_batch_size", "Sources in an encoder run.", ROW_BUCKETS)
        self.decode_batch_size = self._histogram(
            "decode_batch_size", "Rows in a decoder step: a beam or a sample each.", ROW_BUCKETS
        )

    def _cache(self) -> None:
        self.kv_cache_usage = self._gauge("kv_cache_usage_ratio", "Share of the cache blocks in use, 0 to 1.")
        self.kv_cache_blocks = self._gauge(
            "kv_cache_blocks", "Cache blocks kept for self-attention, for cross-attention, and free.", "use"
        )
        self.kv_cache_bytes = self._gauge(
            "kv_cache_bytes", "Cache bytes kept for self-attention, for cross-attention, and free.", "use"
        )

    def _workspace(self) -> None:
        name = "encoder_workspace_"
        self.workspace_materialised = self._gauge(
            f"{name}predicted_materialised_bytes",
            "Score matrices of one layer, had the last encoder run written them out: the sum of H * S^2 * w.",
        )
        self.workspace_fused = self._gauge(
            f"{name}predicted_fused_bytes", "Workspace that the bundle's fit predicts for the last encoder run."
        )
        self.workspace_measured = self._gauge(
            f"{name}measured_bytes", "Peak workspace measured in the last encoder run."
        )
        self.workspace_measured_max = self._gauge(
            f"{name}measured_max_bytes", "Largest peak workspace measured in any encoder run."
        )
        self.workspace_residual = self._gauge(
            f"{name}residual_bytes", "Measured less predicted (fused) workspace of the last encoder run."
        )
        self._workspace_runs(name)
        self._lone_runs()

    def _lone_runs(self) -> None:
        self.lone_runs = self._counter(
            "encoder_lone_runs",
            "Encoder runs of one source alone, by length: up to source_len tokens.",
            "source_len",
        )
        self.lone_tokens = self._counter("encoder_lone_tokens", "Source tokens of those runs.", "source_len")
        self.lone_workspace = self._counter(
            "encoder_lone_workspace_bytes",
            "Sum over those runs of the workspace measured, predicted (fused), and of score matrices written out.",
            "source_len",
            "kind",
        )

    def _workspace_runs(self, name: str) -> None:
        self.workspace_materialised_runs = self._histogram(
            f"{name}predicted_materialised_run_bytes",
            "The same score matrices, of every encoder run.",
            WORKSPACE_BUCKETS_BYTES,
        )
        self.workspace_fused_runs = self._histogram(
            f"{name}predicted_fused_run_bytes", "The fit's prediction, of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.workspace_measured_runs = self._histogram(
            f"{name}measured_run_bytes", "Peak workspace measured, of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.workspace_quotient_runs = self._histogram(
            f"{name}measured_to_predicted_ratio",
            "Measured over predicted (fused) workspace of every encoder run: 1 and its relative residual.",
            QUOTIENT_BUCKETS,
        )

        self.workspace_fit = self._gauge(
            f"{name}fit_coefficient",
            "The bundle's fit of an encoder run's workspace in bytes, a + B * (b * T + c * T^2): its a, b and c.",
            "term",
        )
        self.workspace_fit_residual = self._gauge(
            f"{name}fit_residual_ratio", "Largest relative error of the bundle's fit where it was measured."
        )

    def _memory(self) -> None:
        self.model_info = self._gauge(
            "model_info", "How a model is served; always 1.", "precision", "lowering", "architecture"
        )
        self.model_memory = self._gauge(
            "model_memory_bytes", "What a model counts for in the memory budget: weights, cache, workspace.", "kind"
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        family = Counter(PREFIX + name, documentation, (MODEL_LABEL, *labels), registry=self._registry)
        self._all.append(family)
        return family

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        family = Gauge(PREFIX + name, documentation, (MODEL_LABEL, *labels), registry=self._registry)
        self._all.append(family)
        return family

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> CountedHistogram:
        family = CountedHistogram(
            PREFIX + name, documentation, label=MODEL_LABEL, buckets=buckets, registry=self._registry
        )
        self._all.append(family)
        return family
