"""An interrupt that is never lost: asyncio.run for commands."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does; raises KeyboardInterrupt whenever SIGINT comes.

    asyncio.run's own handler runs when the interpreter next looks for signals. One that comes between its last look and
    the loop's going to sleep waits for whatever wakes the loop, which may be nothing. A handler of the loop's own is
    told through a pipe that the loop sleeps on. A second interrupt does not wait for the work to tidy up.
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
