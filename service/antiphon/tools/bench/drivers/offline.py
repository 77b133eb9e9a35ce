"""The engine without a network. Keeps a constant number of requests in the engine: each one is followed by the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Arrival, FinishReason, Request, Task, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine
from antiphon.engine.interpreter import interpreter_for_steps
from antiphon.engine.sequences.stream import OutputStream
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.runtime.runner import Runner

A = TypeVar("A")


class Offline:
    """Running engine and an event loop, as in a server. Leaving the context stops both.

    runners: one for each lane of the engine. rows: maximum number of sequences that run together.
    """

    def __init__(self, *runners: Runner, rows: int) -> None:
        first, *further = runners
        limits = EngineLimits.for_offline_work(rows)
        self._eos_id = first.facts.eos_id
        metrics = Metrics(MetricFamilies(CollectorRegistry()), "offline")
        self._engine = Engine(first, limits, metrics, further=further)
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def translate(
        self, sources: Sequence[Sequence[int]], *, concurrency: int, max_new_tokens: int, beam_width: int = 1
    ) -> list[list[int]]:
        """Return the target ids of each source, in order, with the end token if the target has one.

        Greedy if beam_width is 1, else the best beam. concurrency: number of requests that wait or run at any time.
        """
        params = SamplingParams(max_new_tokens=max_new_tokens, beam_width=beam_width)
        return self._loop.run(self._translate(sources, concurrency, params))

    def run(self, work: Coroutine[Any, Any, A]) -> A:
        """Run a coroutine in the event loop of the streams."""
        return self._loop.run(work)

    def sample(self, source: Sequence[int], params: SamplingParams) -> list[list[int]]:
        """Return the target ids of each sample of one request."""
        return self._loop.run(self._sample(source, params))

    async def waits_beside(self, source: Sequence[int], params: SamplingParams, max_new_tokens: int) -> list[float]:
        """Return seconds to the first token of short greedy requests while a long request with `params` runs.

        Another caller sends the short requests one after another, from the first token of the long request to its end.
        Call it from within `run`.
        """
        stream, waits = self._submit("long", source, params), []
        await anext(stream)
        rest = asyncio.ensure_future(stream.collect())
        while not rest.done():
            waits += await self.waits_alone(source, max_new_tokens)
        _raise_error(rest.result()[0])
        return waits

    async def waits_alone(self, source: Sequence[int], max_new_tokens: int) -> list[float]:
        """Return seconds to the first token of one short greedy request, as a list of one. Call it within `run`."""
        started_s = time.perf_counter()
        return [await self.first_token_s("short", source, max_new_tokens, client="short") - started_s]

    async def first_token_s(self, name: str, source: Sequence[int], max_new_tokens: int, *, client: str = "") -> float:
        """Stream one request to its end; return the time of its first token, by time.perf_counter.

        name: must differ from the names of all running requests. Cancellation of this call cancels the request. Call it
        from within `run`.
        """
        stream = self._submit(name, source, SamplingParams(max_new_tokens=max_new_tokens), client=client)
        first_s = None
        try:
            async for event in stream:
                first_s = first_s or time.perf_counter()
                if event.error is not None:
                    raise event.error
        except asyncio.CancelledError:
            self._engine.cancel(name)
            raise
        assert first_s is not None
        return first_s

    async def _translate(
        self, sources: Sequence[Sequence[int]], concurrency: int, params: SamplingParams
    ) -> list[list[int]]:
        targets: dict[int, list[int]] = {}

        async def work(waiting: Iterator[tuple[int, Sequence[int]]]) -> None:
            for index, source in waiting:
                targets[index] = self._ids(await self._translate_one(str(index), source, params))

        shared = iter(enumerate(sources))
        await asyncio.gather(*(work(shared) for _ in range(concurrency)))
        return [targets[index] for index in range(len(sources))]

    async def _translate_one(self, name: str, source: Sequence[int], params: SamplingParams) -> TokenEvent:
        stream = self._submit(name, source, params)
        event, *_ = await stream.collect()  # the best output comes first
        _raise_error(event)
        return event

    async def _sample(self, source: Sequence[int], params: SamplingParams) -> list[list[int]]:
        events = await self._submit("samples", source, params).collect()
        _raise_error(events[0])
        return [self._ids(event) for event in events]

    def _submit(self, name: str, source: Sequence[int], params: SamplingParams, *, client: str = "") -> OutputStream:
        stream, arrival_s = OutputStream(name), self._engine.clock()
        arrival = Arrival(request_id=name, arrival_s=arrival_s, client=client)
        self._engine.submit(
            Request(task=Task.GENERATE, is_streamed=True, arrival=arrival, source_ids=tuple(source), params=params),
            stream,
        )
        return stream

    def _ids(self, event: TokenEvent) -> list[int]:
        has_stopped = event.finish_reason is FinishReason.STOP
        return [*event.token_ids, self._eos_id] if has_stopped else list(event.token_ids)

    def __enter__(self) -> Self:
        self._settings = interpreter_for_steps()  # as in the server
        self._settings.__enter__()
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()
        self._loop.close()
        self._settings.__exit__(kind, error, traceback)


def _raise_error(event: TokenEvent) -> None:
    if event.error is not None:
        raise event.error
