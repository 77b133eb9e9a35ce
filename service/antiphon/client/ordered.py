"""Concurrent map over an input that is read lazily, with results in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Finished results that wait for a slow one, per concurrent call: enough that one long text does not stop the others.
WINDOW_PER_CALL = 4


async def ordered_map(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], *, concurrency: int
) -> AsyncIterator[R]:
    """Yield `await work(item)` for each item, in the order of items, with at most `concurrency` at once.

    Items are read lazily: at most WINDOW_PER_CALL * concurrency items, and one more, are read and not yet yielded.
    The first exception of an item, or of `items`, ends the iteration. Leaving the iteration cancels running work.
    """
    slots = asyncio.Semaphore(concurrency)
    room = asyncio.Semaphore(WINDOW_PER_CALL * concurrency)
    window: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()
    started: set[asyncio.Task[R]] = set()

    async def run(item: T) -> R:
        async with slots:
            return await work(item)

    async def feed() -> None:
        try:
            async for item in items:
                await room.acquire()
                task = asyncio.create_task(run(item))
                started.add(task)
                window.put_nowait(task)
        finally:
            window.put_nowait(None)

    feeder = asyncio.create_task(feed())
    try:
        while (task := await window.get()) is not None:
            yield await task
            started.discard(task)
            room.release()
        await feeder
    finally:
        await _cancel(feeder, *started)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
