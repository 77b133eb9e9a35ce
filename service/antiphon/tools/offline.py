"""Engine without a network: for `antiphon bench`, with a constant number of requests, and for `antiphon evaluate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Arrival, FinishReason, Request, Task, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.engine import Engine, interpreter_for_steps
from antiphon.engine.stream import OutputStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.runtime.lanes import AnyRunner
from antiphon.runtime.runner import Runner
from antiphon.text.shortlist import Shortlist

A = TypeVar("A")


class Offline:
    """Running engine and an event loop, as in a server. Leaving the context stops both.

    runners: one for each lane of the engine. rows: maximum number of sequences that run together.
    """

    def __init__(self, *runners: Runner, rows: int) -> None:
        self._eos_id = runners[0].facts.eos_id
        self._engine = _engine(*runners, rows=rows)
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        concurrency: int,
        max_new_tokens: int,
        beam_width: int = 1,
        ignore_eos: bool = False,
        shortlist: Shortlist | None = None,
    ) -> list[list[int]]:
        """Return the target ids of each source, in order, with the end token if the target has one.

        Each answer is read as a whole. Greedy if beam_width is 1, else the best beam. concurrency: number of requests
        that wait or run at any time. ignore_eos: no target ends before max_new_tokens. shortlist: of the model, to
        choose among the candidates of each source.
        """
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            beam_width=beam_width,
            ignore_eos=ignore_eos,
            use_shortlist=shortlist is not None,
        )
        return self._loop.run(self._translate(sources, concurrency, params, shortlist))

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
        self, sources: Sequence[Sequence[int]], concurrency: int, params: SamplingParams, shortlist: Shortlist | None
    ) -> list[list[int]]:
        targets: dict[int, list[int]] = {}

        async def work(waiting: Iterator[tuple[int, Sequence[int]]]) -> None:
            for index, source in waiting:
                candidate_ids = None if shortlist is None else shortlist.candidates(source)
                stream = self._submit(str(index), source, params, candidate_ids=candidate_ids, is_streamed=False)
                event, *_ = await stream.collect()  # the best output comes first
                _raise_error(event)
                targets[index] = self._ids(event)

        shared = iter(enumerate(sources))
        await asyncio.gather(*(work(shared) for _ in range(concurrency)))
        return [targets[index] for index in range(len(sources))]

    async def _sample(self, source: Sequence[int], params: SamplingParams) -> list[list[int]]:
        events = await self._submit("samples", source, params).collect()
        _raise_error(events[0])
        return [self._ids(event) for event in events]

    def _submit(
        self,
        name: str,
        source: Sequence[int],
        params: SamplingParams,
        *,
        client: str = "",
        candidate_ids: NDArray[np.int32] | None = None,
        is_streamed: bool = True,
    ) -> OutputStream:
        stream, arrival_s = OutputStream(name), self._engine.clock()
        arrival = Arrival(request_id=name, arrival_s=arrival_s, client=client)
        self._engine.submit(
            Request(
                task=Task.GENERATE,
                is_streamed=is_streamed,
                arrival=arrival,
                source_ids=tuple(source),
                params=params,
                candidate_ids=candidate_ids,
            ),
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


def _engine(first: Runner, *lanes: Runner, rows: int) -> Engine:
    """Build an engine with queue limits for offline work. lanes: runners of the lanes after the first."""
    metrics = Metrics(MetricFamilies(CollectorRegistry()), "offline")
    return Engine(first, EngineLimits.for_offline_work(rows), metrics, more_runners=lanes)


async def answer_all(runner: AnyRunner, requests: Sequence[Request], *, unit: str) -> list[TokenEvent]:
    """Submit all requests at once; return the last event of the first output of each, in order.

    unit: unit of the progress bar. Raises the error with which the engine refuses a request: QueueFull above 750,000
    requests, since the last quarter of a queue is reserved for other clients.
    """
    from tqdm import tqdm  # of the extra `train`, which a benchmark does not need

    engine = _engine(runner, rows=runner.facts.max_rows)
    engine.start()
    try:
        streams = [OutputStream(request.request_id) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            arrival = replace(request.arrival, arrival_s=engine.clock())
            engine.submit(replace(request, arrival=arrival), stream)
        return [(await stream.collect())[0] for stream in tqdm(streams, unit=unit, disable=None)]
    finally:
        await asyncio.to_thread(engine.stop)
