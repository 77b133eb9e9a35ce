"""asyncio.run for commands, with an interrupt that is never lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does. Raises KeyboardInterrupt after SIGINT.

    The handler of asyncio.run runs when the interpreter next checks for signals. If a signal arrives between the last
    check and the moment when the loop blocks, nothing may wake the loop. A handler of the event loop is called through
    a pipe that wakes it. A second interrupt does not wait for the cleanup of the work.
    """
    interrupted = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                raise KeyboardInterrupt
            interrupted = True
            task.cancel()

        with contextlib.suppress(RuntimeError):  # no handlers outside the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
