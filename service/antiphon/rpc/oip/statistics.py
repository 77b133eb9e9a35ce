"""Counts and times of requests by model, for ModelStatistics in the form that Triton's clients read.

Only requests of this service are counted: its clients compare the counts with what they sent. Triton counts the
requests of all its services. For the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.oip.inference import VERSION
from antiphon.v1 import inference_pb2 as pb


@dataclass(slots=True)
class _Sum:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> oip.StatisticDuration:
        return oip.StatisticDuration(count=self.count, ns=self.ns)


class ModelCounts:
    """Counts of one model. now_ns: wall clock in nanoseconds since 1970."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._last_ms = 0
        self._success, self._fail, self._queue, self._compute = _Sum(), _Sum(), _Sum(), _Sum()

    def succeeded(self, elapsed_ns: int, timings: Iterable[pb.Timing]) -> None:
        """Count a request that was answered, with the times of each of its texts."""
        self._success.add(elapsed_ns)
        for timing in timings:
            queued_ns = timing.queued.ToNanoseconds()
            self._queue.add(queued_ns)
            self._compute.add(timing.total.ToNanoseconds() - queued_ns)
        self._last_ms = self._now_ns() // 1_000_000

    def failed(self, elapsed_ns: int) -> None:
        """Count a request that ended with an error."""
        self._fail.add(elapsed_ns)
        self._last_ms = self._now_ns() // 1_000_000

    def message(self, name: str) -> oip.ModelStatistics:
        """Return the counts so far as a message for the model of this name."""
        return oip.ModelStatistics(
            name=name,
            version=VERSION,
            last_inference=self._last_ms,
            inference_count=self._compute.count,
            execution_count=self._compute.count,
            inference_stats=oip.InferStatistics(
                success=self._success.message(),
                fail=self._fail.message(),
                queue=self._queue.message(),
                compute_infer=self._compute.message(),
            ),
        )
