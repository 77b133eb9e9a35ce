"""Requests to an engine without the network, for `antiphon evaluate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry
from tqdm import tqdm

from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Request, TokenEvent
from antiphon.engine.engine import Engine
from antiphon.engine.sequences.stream import OutputStream
from antiphon.observability.metrics.engine_metrics import Metrics
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.runtime.lanes import AnyRunner


async def answer_all(runner: AnyRunner, requests: Sequence[Request], *, unit: str) -> list[TokenEvent]:
    """Submit all requests at once; return the last event of the first output of each, in order.

    unit: unit of the progress bar. Raises the error with which the engine refuses a request: QueueFull above 750,000
    requests, since the last quarter of a queue is reserved for other clients.
    """
    limits = EngineLimits.for_offline_work(runner.facts.max_rows)
    engine = Engine(runner, limits, Metrics(MetricFamilies(CollectorRegistry()), "offline"))
    engine.start()
    try:
        streams = [OutputStream(request.request_id) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            arrival = replace(request.arrival, arrival_s=engine.clock())
            engine.submit(replace(request, arrival=arrival), stream)
        return [(await stream.collect())[0] for stream in tqdm(streams, unit=unit, disable=None)]
    finally:
        await asyncio.to_thread(engine.stop)
