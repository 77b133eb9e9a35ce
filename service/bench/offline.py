"""The engine without a network: as many requests at once as asked for, each followed by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import uvloop
from prometheus_client import CollectorRegistry

from antiphon.service.engine import Engine, EngineConfig
from antiphon.service.metrics import Metrics
from antiphon.service.request import FinishReason, Request, SamplingParams, TokenEvent
from antiphon.service.runner import Runner
from antiphon.service.stream import OutputStream


def translate_offline(
    runner: Runner, sources: Sequence[Sequence[int]], *, rows: int, concurrency: int, max_new_tokens: int
) -> list[list[int]]:
    """Greedy target ids of each source, in order, the end token included where it came.

    rows: sequences that run together. concurrency: requests that wait or run at any time.
    """
    return uvloop.run(_translate(runner, sources, rows, concurrency, max_new_tokens))


async def _translate(
    runner: Runner, sources: Sequence[Sequence[int]], rows: int, concurrency: int, max_new_tokens: int
) -> list[list[int]]:
    num_tokens = sum(map(len, sources))
    config = EngineConfig(max_num_seqs=rows, max_queued_requests=concurrency, max_queued_tokens=num_tokens)
    engine = Engine(runner, config, Metrics(CollectorRegistry()))
    events: dict[int, TokenEvent] = {}

    async def work(waiting: Iterator[tuple[int, Sequence[int]]]) -> None:
        for index, source in waiting:
            events[index] = await _translate_one(engine, str(index), source, max_new_tokens)

    engine.start()
    try:
        shared = iter(enumerate(sources))
        await asyncio.gather(*(work(shared) for _ in range(concurrency)))
    finally:
        await asyncio.to_thread(engine.stop)
    return [_ids(events[index], runner.eos_id) for index in range(len(sources))]


async def _translate_one(engine: Engine, name: str, source: Sequence[int], max_new_tokens: int) -> TokenEvent:
    stream = OutputStream(name)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    engine.submit(Request(request_id=name, source_ids=tuple(source), params=params, arrival_s=engine.clock()), stream)
    event = await stream.collect()
    if event.error is not None:
        raise event.error
    return event


def _ids(event: TokenEvent, eos_id: int) -> list[int]:
    return [*event.token_ids, eos_id] if event.finish_reason is FinishReason.STOP else list(event.token_ids)
