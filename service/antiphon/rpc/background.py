"""Blocking work in daemon threads: a process that stops does not wait for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

THREAD_PREFIX = "antiphon-"
"""Prefix of the names of this server's own threads."""

# Time for a thread that has delivered its result to end.
_LAST_LINES_S = 0.05

_A = TypeVar("_A")


def in_background(work: Callable[[], _A], name: str) -> asyncio.Future[_A]:
    """Run work in a daemon thread and return its future. Cancelling the future does not stop the work."""
    future: Future[_A] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"{THREAD_PREFIX}{name}", daemon=True).start()
    return asyncio.wrap_future(future)


def ignore_result(future: asyncio.Future[_A]) -> None:
    """Ignore the result of a future, and its exception too."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


@contextlib.asynccontextmanager
async def running_in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines that never end until the context exits."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    for task in tasks:
        task.add_done_callback(_report)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.critical("a background task failed and will not run again", exc_info=fault)


def is_anything_left() -> bool:
    """Return whether any of this server's threads still runs, such as one that loads a model or a hung engine."""
    left = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
    for thread in left:
        thread.join(_LAST_LINES_S)
    return any(thread.is_alive() for thread in left)
