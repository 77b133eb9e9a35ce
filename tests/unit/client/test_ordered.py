"""Concurrent work with ordered results: bounded concurrency, bounded reading ahead, and no task left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from antiphon.client.many import WINDOW_PER_REQUEST
from antiphon.client.many_tasks import ordered_map


async def counting(stop: int, read: list[int] | None = None) -> AsyncIterator[int]:
    for number in range(stop):
        if read is not None:
            read.append(number)
        yield number


async def test_ordered_map_keeps_order_when_later_items_finish_first() -> None:
    finished = [asyncio.Event() for _ in range(6)]

    async def work(number: int) -> int:
        if number + 1 < len(finished):
            await finished[number + 1].wait()
        finished[number].set()
        return number * 10

    assert [r async for r in ordered_map(counting(6), work, concurrency=6)] == [0, 10, 20, 30, 40, 50]


async def test_ordered_map_never_exceeds_concurrency() -> None:
    active, most = 0, 0

    async def work(number: int) -> int:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return number

    assert [r async for r in ordered_map(counting(50), work, concurrency=3)] == list(range(50))
    assert most == 3


async def test_ordered_map_reads_no_input_beyond_its_window_while_the_first_item_is_slow() -> None:
    first, others = asyncio.Event(), asyncio.Semaphore(0)
    read: list[int] = []
    num_allowed = WINDOW_PER_REQUEST * 2 + 1

    async def work(number: int) -> int:
        if number == 0:
            await first.wait()
        others.release()
        return number

    async def release_first() -> None:
        for _ in range(num_allowed - 2):  # every other item of the window
            await others.acquire()
        assert len(read) == num_allowed
        first.set()

    releasing = asyncio.create_task(release_first())
    assert [r async for r in ordered_map(counting(100, read), work, concurrency=2)] == list(range(100))
    await releasing


async def test_ordered_map_raises_the_first_failure_and_cancels_the_rest() -> None:
    was_cancelled = asyncio.Event()

    async def work(number: int) -> int:
        if number == 1:
            raise LookupError("one")
        if number == 2:
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
        return number

    results = ordered_map(counting(3), work, concurrency=3)
    assert await anext(results) == 0
    with pytest.raises(LookupError, match="one"):
        await anext(results)
    assert was_cancelled.is_set()


async def test_ordered_map_raises_the_error_of_its_input_after_the_earlier_results() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise OSError("gone")

    async def work(number: int) -> int:
        return number

    results = ordered_map(broken(), work, concurrency=2)
    assert await anext(results) == 1
    with pytest.raises(OSError, match="gone"):
        await anext(results)


async def test_ordered_map_cancels_running_work_when_its_consumer_stops_early() -> None:
    num_cancelled = 0

    async def work(number: int) -> int:
        nonlocal num_cancelled
        if number == 0:
            return 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            num_cancelled += 1
            raise
        return number

    results = ordered_map(counting(4), work, concurrency=4)
    async for _ in results:
        break
    await asyncio.sleep(0)  # let the others start
    await results.aclose()  # type: ignore[attr-defined]
    assert num_cancelled == 3
