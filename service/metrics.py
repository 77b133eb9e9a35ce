"""Every metric's name, meaning and buckets, once. Meanings follow vLLM's where it has the metric.

The engine reports facts through the methods; nothing else writes here. Refuses labels that grow with traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from antiphon.service.histogram import CountedHistogram
from antiphon.service.request import FinishReason, Timing
from antiphon.service.runner import EncodeReport

PREFIX = "antiphon_"

# A token takes these models 2-10 ms on a CPU.
TOKEN_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
WORKSPACE_BUCKETS_BYTES = tuple(4**power * 1024 for power in range(3, 13))  # 64 KiB to 16 GiB
RESIDUAL_BUCKETS = (-1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """How the block pool is divided now, in blocks, and what one block weighs."""

    num_self: int
    num_cross: int
    num_free: int
    block_bytes: int


_ANSWERED = frozenset(FinishReason) - {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR}


class Metrics:
    """The server's metrics in a registry of their own. Methods may be called from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._max_measured_bytes = 0
        self._requests()
        self._latencies()
        self._steps()
        self._cache()
        self._workspace()

    def watch_waiting(self, count: Callable[[], float]) -> None:
        """Read the number of waiting requests from `count` at every scrape."""
        self.num_requests_waiting.set_function(count)

    def refused(self, reason: str) -> None:
        """Count a request refused at submit, by ErrorInfo reason."""
        self.requests_refused.labels(reason).inc()

    def admitted(self, queued_s: float) -> None:
        """Note that a request leaves the queue to run."""
        self.request_queue_time.observe(queued_s)

    def encoded(self, report: EncodeReport, num_source_tokens: int) -> None:
        """Note an encoder run over sources of so many tokens together, padding not counted."""
        self.encode_batch_size.observe(report.rows)
        self.prompt_tokens.inc(num_source_tokens)
        self.padding_tokens.inc(report.num_tokens - num_source_tokens)
        self._note_workspace(report)

    def first_token(self, since_arrival_s: float) -> None:
        """Note a request's first token."""
        self.time_to_first_token.observe(since_arrival_s)

    def decoded(self, num_rows: int, num_repeated: int, gap_s: float) -> None:
        """Note a decoder run; `num_repeated` of its rows had a token `gap_s` seconds before."""
        self.decode_batch_size.observe(num_rows)
        self.generation_tokens.inc(num_rows)
        if num_repeated:
            self.inter_token_latency.observe(gap_s, num_repeated)

    def finished(self, reason: FinishReason, stage: str, timing: Timing) -> None:
        """Note a request's end, in the stage (waiting or running) where it came."""
        if reason in _ANSWERED:
            self.request_success.labels(reason.value).inc()
            self.e2e_request_latency.observe(timing.total_s)
        elif reason is FinishReason.CANCELLED:
            self.cancellations.labels(stage).inc()
        elif reason is FinishReason.DEADLINE:
            self.deadline_missed(stage)
        else:
            self.request_errors.labels(stage).inc()

    def deadline_missed(self, stage: str) -> None:
        """Count a deadline that passed at submit, while waiting or while running."""
        self.deadline_misses.labels(stage).inc()

    def occupied(self, num_running: int, cache: CacheUse) -> None:
        """Note how many sequences run and what the cache holds."""
        self.num_requests_running.set(num_running)
        total = cache.num_self + cache.num_cross + cache.num_free
        self.kv_cache_usage.set((cache.num_self + cache.num_cross) / total)
        for use, num_blocks in (("self", cache.num_self), ("cross", cache.num_cross), ("free", cache.num_free)):
            blocks, num_bytes = self._kv_cache_parts[use]
            blocks.set(num_blocks)
            num_bytes.set(num_blocks * cache.block_bytes)

    def _note_workspace(self, report: EncodeReport) -> None:
        measured, predicted = report.peak_workspace_bytes, report.predicted_fused_bytes
        self.workspace_materialised.set(report.predicted_materialised_bytes)
        self.workspace_materialised_runs.observe(report.predicted_materialised_bytes)
        if predicted is not None:
            self.workspace_fused.set(predicted)
            self.workspace_fused_runs.observe(predicted)
        if measured is not None:
            self.workspace_measured.set(measured)
            self.workspace_measured_runs.observe(measured)
            self._max_measured_bytes = max(self._max_measured_bytes, measured)
            self.workspace_measured_max.set(self._max_measured_bytes)
        if measured is not None and predicted is not None:
            self.workspace_residual.set(measured - predicted)
            self.workspace_residual_runs.observe((measured - predicted) / predicted if predicted else 0.0)

    def _requests(self) -> None:
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.num_requests_running = self._gauge("num_requests_running", "Requests being generated.")
        self.request_success = self._counter(
            "request_success", "Requests answered in full, by how the output ended.", "finished_reason"
        )
        self.request_errors = self._counter("request_errors", "Requests ended by a fault or a shutdown.", "stage")
        self.requests_refused = self._counter("requests_refused", "Requests refused at submit.", "reason")
        self.cancellations = self._counter("cancellations", "Requests cancelled by the client.", "stage")
        self.deadline_misses = self._counter("deadline_misses", "Requests whose deadline passed.", "stage")

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
        self.prompt_tokens = self._counter("prompt_tokens", "Source tokens encoded.")
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
        self._kv_cache_parts = {
            use: (self.kv_cache_blocks.labels(use), self.kv_cache_bytes.labels(use))
            for use in ("self", "cross", "free")
        }

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

    def _workspace_runs(self, name: str) -> None:
        self.workspace_materialised_runs = self._histogram(
            f"{name}predicted_materialised_run_bytes", "Of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.workspace_fused_runs = self._histogram(
            f"{name}predicted_fused_run_bytes", "Of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.workspace_measured_runs = self._histogram(
            f"{name}measured_run_bytes", "Of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.workspace_residual_runs = Histogram(  # the client's own: ours renders no negative bounds
            f"{PREFIX}{name}residual_ratio",
            "Measured less predicted over predicted, of every encoder run.",
            buckets=RESIDUAL_BUCKETS,
            registry=self._registry,
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self._registry)

    def _gauge(self, name: str, documentation: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> CountedHistogram:
        return CountedHistogram(PREFIX + name, documentation, buckets=buckets, registry=self._registry)
