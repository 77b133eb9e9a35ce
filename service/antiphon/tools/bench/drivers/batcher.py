"""Batcher for a library without continuous batching: collects requests for a short time and runs them as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherConfig:
    """workers: maximum number of concurrent batches. window_s: time that the oldest request waits for others."""

    workers: int
    max_batch: int
    window_s: float


class Batcher(Generic[Item, Answer]):
    """Answers requests in batches. Use it as a context manager within one event loop.

    A batch starts when a worker is free and either max_batch requests wait or the oldest has waited for window_s.
    run: answers one batch, in order. It may block, since it runs in its own thread.
    """

    def __init__(self, run: Callable[[Sequence[Item]], Sequence[Answer]], config: BatcherConfig) -> None:
        self._run = run
        self._config = config
        self._waiting: deque[tuple[float, Item, asyncio.Future[Answer]]] = deque()
        self._has_news = asyncio.Event()
        self._free = asyncio.Semaphore(config.workers)
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="batch")
        self._batches: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Answer:
        """Return the answer to one request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((loop.time(), item, future))
        self._has_news.set()
        return await future

    async def _collect(self) -> None:
        while True:
            await self._free.acquire()
            await self._fill()
            members = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._config.max_batch))]
            self._batches.add(task := asyncio.create_task(self._answer([member[1:] for member in members])))
            task.add_done_callback(self._batches.discard)

    async def _fill(self) -> None:
        """Wait until a batch can start."""
        loop = asyncio.get_running_loop()
        while len(self._waiting) < self._config.max_batch:
            left_s = self._waiting[0][0] + self._config.window_s - loop.time() if self._waiting else None
            if left_s is not None and left_s <= 0:
                return
            self._has_news.clear()
            try:
                await asyncio.wait_for(self._has_news.wait(), left_s)
            except TimeoutError:
                return

    async def _answer(self, members: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        wanted = [(item, future) for item, future in members if not future.done()]
        try:
            if wanted:
                items = [item for item, _ in wanted]
                answers = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, items)
                for (_, future), answer in zip(wanted, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        except Exception as fault:
            for _, future in wanted:
                if not future.done():
                    future.set_exception(fault)
        finally:
            self._free.release()

    async def __aenter__(self) -> Self:
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._collector.cancel()
        await asyncio.gather(self._collector, *self._batches, return_exceptions=True)
        self._threads.shutdown()
