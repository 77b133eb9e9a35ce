from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from antiphon.cli.lines import run_interruptible


def test_run_returns_the_result_of_the_coroutine() -> None:
    async def work() -> int:
        return 7

    assert run_interruptible(work()) == 7


def test_interrupt_cancels_the_running_coroutine() -> None:
    seen = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())
    assert seen == ["cancelled"]


def test_second_interrupt_ends_a_coroutine_that_ignores_the_first() -> None:
    async def work() -> None:
        for _ in range(2):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise AssertionError("the second interrupt was not raised")

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work())


def test_signal_wakes_a_sleeping_loop() -> None:
    """Without a wake-up descriptor a signal just before the loop sleeps is not seen until something else wakes it."""

    async def wakeup_descriptor() -> int:
        found = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        return found

    assert asyncio.run(wakeup_descriptor()) == -1
    assert run_interruptible(wakeup_descriptor()) != -1


def test_other_cancellation_is_not_an_interrupt() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_interruptible(work())
