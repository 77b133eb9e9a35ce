"""Runs requests on the model that they name and counts the results, for single requests and for streams.

ModelStatistics returns the counts in the form that Triton's clients read. Only requests of this service are counted:
its clients compare the counts with what they sent. Triton counts the requests of all its services.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from antiphon.domain.errors import InvalidArgument, ModelNotFound
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.context import RequestContext
from antiphon.rpc.oip.inference import STREAMED, VERSION, Inference, read_inference
from antiphon.rpc.v1.models import LoadedModel, Models
from antiphon.v1 import inference_pb2 as pb


class Answering:
    """Models with counts of their requests. For the event loop. clock_ns: monotonic clock in nanoseconds."""

    def __init__(self, models: Models, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.models = models
        self._clock_ns = clock_ns
        self._counts: dict[str, ModelCounts] = {}

    def find(self, name: str, version: str) -> LoadedModel:
        """Return the model of a name and version. Raises ModelNotFound."""
        model = self.models.find(name)
        if version not in ("", VERSION):
            raise ModelNotFound(f"model {model.name!r} has no version {version[:80]!r}; its only one is {VERSION!r}")
        return model

    def read(self, message: oip.ModelInferRequest, context: RequestContext, *, is_streamed: bool = False) -> Inference:
        """Read a request for the model it names. Raises AntiphonError.

        is_streamed: stream a generated answer; the request must then have exactly one text.
        """
        model = self.find(message.model_name, message.model_version)
        context.record.routed(model.name, model.metrics)
        with self._counting_failures(model):
            inference = read_inference(message, model, is_streamed=is_streamed)
            if inference.task is STREAMED and len(inference.messages) > 1:
                texts = f"{len(inference.messages)} texts"
                raise InvalidArgument("text_input", texts, "one text in a stream; send a request for each")
            return inference

    async def infer(self, inference: Inference, context: RequestContext) -> oip.ModelInferResponse:
        """Return the complete answer to a request. Raises AntiphonError."""
        with self.counting(inference.model) as timings:
            answers = await inference.answers(context)
            timings += [answer.timing for answer in answers]
            tensors = inference.task.answer(answers, inference.shape)
            return inference.response(tensors, [answer.usage for answer in answers])

    @contextlib.contextmanager
    def counting(self, model: LoadedModel) -> Iterator[list[pb.Timing]]:
        """Count a request. The caller appends the timings of its texts to the list."""
        start_ns = self._clock_ns()
        timings: list[pb.Timing] = []
        with self._counting_failures(model, start_ns):
            yield timings
        self.counts_of(model).succeeded(self._clock_ns() - start_ns, timings)

    def counts_of(self, model: LoadedModel) -> ModelCounts:
        """Return the counts of a model so far."""
        return self._counts.setdefault(model.name, ModelCounts())

    @contextlib.contextmanager
    def _counting_failures(self, model: LoadedModel, start_ns: int | None = None) -> Iterator[None]:
        start_ns = self._clock_ns() if start_ns is None else start_ns
        try:
            yield
        except BaseException:
            self.counts_of(model).failed(self._clock_ns() - start_ns)
            raise


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
