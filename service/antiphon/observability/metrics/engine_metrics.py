"""Reports of one model's engine. Each method updates the model's metrics.

The metrics are looked up once by their labels, so that a report needs no look-up. Nothing else writes to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from prometheus_client import Counter

from antiphon.bundle.manifest import MemoryFit
from antiphon.domain.errors import refusal_reasons
from antiphon.domain.request import ANSWERED, CancelCause, FinishReason, Priority, Task, Timing
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.observability.metrics.workspace_metrics import WorkspaceMetrics
from antiphon.ops.workspace import Workspace
from antiphon.runtime.runner import EncodeReport

STAGES = ("waiting", "encoding", "running")
"""Stages in which a request can end: the values of SequenceState."""
# Missed deadlines have their own metric, so they are not counted as cancellations.
_CAUSES = tuple(cause.value for cause in CancelCause if cause is not CancelCause.DEADLINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Current use of the block pool in blocks, and the size of one block."""

    num_self: int
    num_cross: int
    num_free: int
    block_bytes: int


class WatchedQueue(Protocol):
    """Values of a queue that are read at every scrape."""

    @property
    def num_source_tokens(self) -> int:
        """Number of source tokens in the queue."""

    @property
    def num_preempted(self) -> int:
        """Number of requests in the queue that were preempted."""

    def __len__(self) -> int: ...

    def expected_wait_s(self, now_s: float) -> float | None:
        """Return the estimated time to serve all requests in the queue; None if it is unknown."""


class Metrics:
    """Metrics of one model. Methods may be called from any thread."""

    def __init__(self, families: MetricFamilies, model_name: str) -> None:
        """Show every metric of the model at zero, for every value of its other labels."""
        self._families = families
        self._name = model_name
        self._is_removed = False
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}  # of `_count`, as they are needed
        self._bind_requests(families, model_name)
        self._bind_steps(families, model_name)
        self._workspace = WorkspaceMetrics(families.workspace, model_name)
        self._show_labels(families)

    def remove(self) -> None:
        """Remove the model from every family. Later reports are not shown."""
        self._is_removed = True
        for watched in (self._waiting, self._waiting_tokens, self._preempted, self._expected_wait, self._step_age):
            watched.set_function(lambda: 0.0)  # drops the old function, which references the engine
        self._families.remove(self._name)

    def watch_queue(self, queue: WatchedQueue, clock: Callable[[], float]) -> None:
        """Read the queue's length, tokens and expected wait at every scrape."""

        def expected_wait_s() -> float:
            wait_s = queue.expected_wait_s(clock())
            return math.nan if wait_s is None else wait_s

        self._waiting.set_function(lambda: float(len(queue)))
        self._waiting_tokens.set_function(lambda: float(queue.num_source_tokens))
        self._preempted.set_function(lambda: float(queue.num_preempted))
        self._expected_wait.set_function(expected_wait_s)

    def watch_steps(self, busy_s: Callable[[], float]) -> None:
        """Read the age of the current step at every scrape."""
        self._step_age.set_function(busy_s)

    def hangs(self, *, is_hung: bool) -> None:
        """Report whether the engine is considered hung."""
        if not self._is_removed:
            self._stuck.set(is_hung)

    def holds(self, **kinds: int) -> None:
        """Report the model's bytes in the memory budget by kind: weights, cache, workspace."""
        for kind, num_bytes in kinds.items():
            self._families.model_memory.labels(self._name, kind).set(num_bytes)

    def is_served(self, *, precision: str, lowering: str, architecture: str) -> None:
        """Report precision, lowering and architecture of the model."""
        self._families.model_info.labels(self._name, precision, lowering, architecture).set(1)

    def predicts_by(self, fit: MemoryFit) -> None:
        """Report the fit that predicts the workspace of the model's encoder."""
        self._workspace.predicts_by(fit)

    def watch_arena(self, *workspaces: Workspace) -> None:
        """Read the allocators of the model's graphs, one for each lane, at every scrape."""
        self._families.arenas.watch(self._name, workspaces)

    def streamed(self, num_messages: int) -> None:
        """Count messages written to streams."""
        self._stream_messages.inc(num_messages)

    def submitted(self, task: Task, priority: Priority) -> None:
        """Count a request that the engine accepts."""
        self._submitted[task, priority].inc()

    def refused(self, reason: str) -> None:
        """Count a refused RPC by ErrorInfo reason."""
        self._count(self._families.requests_refused, reason)

    def admitted(self, queued_s: float, trace_id: str = "") -> None:
        """Record that a request leaves the queue to run. trace_id, here and below: its recorded trace, if any."""
        self._queue_time.observe(queued_s, trace_id=trace_id)

    def encoded(self, report: EncodeReport, num_source_tokens: int) -> None:
        """Record an encoder run. num_source_tokens: tokens of all its sources without padding."""
        self._encode_batch_size.observe(report.rows)
        self._prompt_tokens.inc(num_source_tokens)
        self._padding_tokens.inc(report.num_tokens - num_source_tokens)
        self._workspace.encoded(report)

    def prompted(self, num_tokens: int) -> None:
        """Count the tokens of prompts that a decoder-only model is about to read."""
        self._prompt_tokens.inc(num_tokens)

    def first_token(self, since_arrival_s: float, trace_id: str = "") -> None:
        """Record the time to a request's first token."""
        self._time_to_first_token.observe(since_arrival_s, trace_id=trace_id)

    def preempted(self) -> None:
        """Count the preemption of a running request."""
        self._preemptions.inc()

    def resumed(self, gap_s: float) -> None:
        """Record the gap between two tokens of a request that was preempted between them."""
        self._inter_token_latency.observe(gap_s)

    def decoded(self, num_rows: int, num_repeated: int, gap_s: float) -> None:
        """Record a decoder run. `num_repeated` of its rows had a token `gap_s` seconds before."""
        self._decode_batch_size.observe(num_rows)
        self._generation_tokens.inc(num_rows)
        if num_repeated:
            self._inter_token_latency.observe(gap_s, num_repeated)

    def finished(
        self,
        reason: FinishReason,
        stage: str,
        timing: Timing,
        *,
        cause: CancelCause | None = None,
        trace_id: str = "",
    ) -> None:
        """Record a request's end. stage: waiting, encoding or running. cause: cause of a cancellation."""
        families = self._families
        if reason in ANSWERED:
            self._count(families.request_success, reason.value)
            self._e2e_latency.observe(timing.total_s, trace_id=trace_id)
        elif reason is FinishReason.CANCELLED:
            self._count(families.cancellations, stage, (cause or CancelCause.CLIENT).value)
        elif reason is FinishReason.DEADLINE:
            self.deadline_missed(stage)
        else:
            self._count(families.request_errors, stage)

    def deadline_missed(self, stage: str) -> None:
        """Count a deadline that passed at submit, or in a stage of `finished` or `left_unread`."""
        self._count(self._families.deadline_misses, stage)

    def left_unread(self, cause: CancelCause) -> None:
        """Count a request that the engine has finished, and whose answer was not read to its end."""
        if cause is CancelCause.DEADLINE:
            self.deadline_missed("streaming")
        else:
            self._count(self._families.cancellations, "streaming", cause.value)

    def rows_stood_empty(self, row_seconds: float) -> None:
        """Add the time for which rows stood empty while requests waited: rows times seconds."""
        self._empty_row_seconds.inc(row_seconds)

    def occupied(self, num_running: int, cache: CacheUse) -> None:
        """Report the number of running sequences and the use of the cache."""
        self._running.set(num_running)
        total = cache.num_self + cache.num_cross + cache.num_free
        self._cache_usage.set((cache.num_self + cache.num_cross) / max(1, total))
        for use, num_blocks in (("self", cache.num_self), ("cross", cache.num_cross), ("free", cache.num_free)):
            blocks, num_bytes = self._cache_parts[use]
            blocks.set(num_blocks)
            num_bytes.set(num_blocks * cache.block_bytes)

    def _show_labels(self, families: MetricFamilies) -> None:
        """Show the counters at zero: rate() misses the first event of a counter that appears with it."""
        shown: list[tuple[Counter, Iterable[tuple[str, ...]]]] = [
            (families.request_success, ((reason.value,) for reason in ANSWERED)),
            (families.request_errors, ((stage,) for stage in STAGES)),
            (families.requests_refused, ((reason,) for reason in refusal_reasons())),
            (families.cancellations, product((*STAGES, "streaming"), _CAUSES)),
            (families.deadline_misses, ((stage,) for stage in ("submit", *STAGES, "streaming"))),
        ]
        for family, values in shown:
            for labels in values:
                family.labels(self._name, *labels)

    def _count(self, family: Counter, *labels: str) -> None:
        if not self._is_removed:  # otherwise the family would create the label set again
            child = self._children.get((family, labels))
            if child is None:
                child = self._children[family, labels] = family.labels(self._name, *labels)
            child.inc()

    def _bind_requests(self, families: MetricFamilies, name: str) -> None:
        self._submitted = {
            (task, priority): families.requests_submitted.labels(name, task.value, priority.value)
            for task, priority in product(Task, Priority)
        }
        self._stream_messages = families.stream_messages.labels(name)
        self._waiting = families.num_requests_waiting.labels(name)
        self._waiting_tokens = families.num_tokens_waiting.labels(name)
        self._preemptions = families.preemptions.labels(name)
        self._preempted = families.num_requests_preempted.labels(name)
        self._expected_wait = families.expected_wait.labels(name)
        self._running = families.num_requests_running.labels(name)
        self._time_to_first_token = families.time_to_first_token.labels(name)
        self._inter_token_latency = families.inter_token_latency.labels(name)
        self._e2e_latency = families.e2e_request_latency.labels(name)
        self._queue_time = families.request_queue_time.labels(name)

    def _bind_steps(self, families: MetricFamilies, name: str) -> None:
        self._step_age = families.engine_last_step_age.labels(name)
        self._stuck = families.engine_stuck.labels(name)
        self._prompt_tokens = families.prompt_tokens.labels(name)
        self._generation_tokens = families.generation_tokens.labels(name)
        self._padding_tokens = families.padding_tokens.labels(name)
        self._encode_batch_size = families.encode_batch_size.labels(name)
        self._decode_batch_size = families.decode_batch_size.labels(name)
        self._empty_row_seconds = families.empty_row_seconds.labels(name)
        self._cache_usage = families.kv_cache_usage.labels(name)
        self._cache_parts = {
            use: (families.kv_cache_blocks.labels(name, use), families.kv_cache_bytes.labels(name, use))
            for use in ("self", "cross", "free")
        }
