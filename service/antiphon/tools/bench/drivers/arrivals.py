"""Open-loop load in one process: each request starts at its scheduled time. A coroutine function answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

# Answers the request with an index and returns the time of its first token, by time.perf_counter.
Ask = Callable[[int], Awaitable[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Seconds from the scheduled arrival of each request to its first token and to its end.

    For an abandoned request, both values are the time until it was abandoned.
    """

    first_s: tuple[float, ...]
    last_s: tuple[float, ...]


async def offer(ask: Ask, arrivals: Sequence[float], *, patience_s: float) -> Waits:
    """Call ask at each arrival time. Abandon every request without an answer patience_s after the last arrival.

    Waits count from the scheduled time, so that a delay of the event loop is included.
    """
    start_s = time.perf_counter()

    async def one(index: int, arrival_s: float) -> tuple[float, float]:
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        first_s = await ask(index)
        return first_s - start_s - arrival_s, time.perf_counter() - start_s - arrival_s

    tasks = [asyncio.create_task(one(index, arrival_s)) for index, arrival_s in enumerate(arrivals)]
    _, late = await asyncio.wait(tasks, timeout=arrivals[-1] + patience_s)
    given_up_s = time.perf_counter() - start_s
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    waits = [
        (given_up_s - arrival_s,) * 2 if task in late else task.result()
        for task, arrival_s in zip(tasks, arrivals, strict=True)
    ]
    return Waits(first_s=tuple(first for first, _ in waits), last_s=tuple(last for _, last in waits))
