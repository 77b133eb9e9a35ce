"""The engine without a network: as many requests at once as asked for, each followed by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import uvloop
from prometheus_client import CollectorRegistry

from antiphon.service.engine import Engine, EngineConfig
from antiphon.service.metrics import Metrics
from antiphon.service.request import FinishReason, Request, SamplingParams, TokenEvent
from antiphon.service.runner import Runner
from antiphon.service.stream import OutputStream


class Offline:
    """A running engine and an event loop, as in a server; ended on leaving the context.

    rows: sequences that run together.
    """

    def __init__(self, runner: Runner, *, rows: int) -> None:
        config = EngineConfig(max_num_seqs=rows, max_queued_requests=1_000_000, max_queued_tokens=100_000_000)
        self._eos_id = runner.eos_id
        self._engine = Engine(runner, config, Metrics(CollectorRegistry()))
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def translate(self, sources: Sequence[Sequence[int]], *, concurrency: int, max_new_tokens: int) -> list[list[int]]:
        """Greedy target ids of each source, in order, the end token included where it came.

        concurrency: requests that wait or run at any time.
        """
        return self._loop.run(self._translate(sources, concurrency, SamplingParams(max_new_tokens=max_new_tokens)))

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
        stream = OutputStream(name)
        arrival_s = self._engine.clock()
        self._engine.submit(
            Request(request_id=name, source_ids=tuple(source), params=params, arrival_s=arrival_s), stream
        )
        event = await stream.collect()
        if event.error is not None:
            raise event.error
        return event

    def _ids(self, event: TokenEvent) -> list[int]:
        has_stopped = event.finish_reason is FinishReason.STOP
        return [*event.token_ids, self._eos_id] if has_stopped else list(event.token_ids)

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()
        self._loop.close()
