"""Shutdown of a server, from the first signal to the last byte: signals, the drain and exit codes.

docs/RELIABILITY.md describes what clients see.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from antiphon.rpc.background import ignore_result
from antiphon.rpc.standard_services import Probes
from antiphon.rpc.v1.handlers import Handlers
from antiphon.server.models.control import Control

log = logging.getLogger(__name__)

EXIT_ENGINE_FAULT = 1
EXIT_USER_ERROR = 2

# Time for complete answers that are not read yet: a client that reads nothing must not keep the process alive.
_FLUSH_GRACE_S = 5.0
# A process that ends with unread bytes from clients resets the connections, and unacknowledged answers are lost.
_ACKNOWLEDGE_S = 0.1
_ENGINE_CHECK_S = 1.0
_LAST_BYTES_S = 3.0

_A = TypeVar("_A")


class Stop:
    """Request to stop the process. A second signal ends it immediately."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()

    def on_signals(self) -> None:
        """Stop on SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return when the process is asked to stop."""
        await self._stopping.wait()

    async def unless_asked(self, work: Awaitable[_A]) -> _A | None:
        """Return the result of the work, or None as soon as the process is asked to stop; the work then continues."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if task.done():
            return task.result()
        ignore_result(task)
        return None

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            end_now(128 + number)
        log.info("%s: stopping; send it again to stop at once", number.name)
        self._stopping.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """Time limits of a shutdown."""

    delay_s: float
    """Time in which new requests are still served, so that load balancers notice the probes."""
    drain_s: float
    """Time after that, in which new requests are refused, and running and waiting ones finish."""


async def until_stopped(stop: Stop, grace: Grace, control: Control, calls: Handlers, probes: Probes) -> int:
    """Serve until asked to stop or an engine is lost, then drain with open ports. Return the exit code."""
    is_asked = await _until_asked_or_lost(stop, control)
    await probes.leave()
    if is_asked and grace.delay_s:
        log.info("new requests are served for %s s more", grace.delay_s)
        await asyncio.sleep(grace.delay_s)
    await _drain(grace.drain_s, control, calls)
    return EXIT_ENGINE_FAULT if not is_asked or control.has_hung_engine else 0


async def _until_asked_or_lost(stop: Stop, control: Control) -> bool:
    while not control.has_lost_engine:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _ENGINE_CHECK_S)
            return True
    log.critical("the thread of an engine has ended; stopping, so that the supervisor restarts this process")
    return False


async def _drain(grace_s: float, control: Control, calls: Handlers) -> None:
    """Finish running requests and refuse new ones. The port stays open, so that clients receive the refusals."""
    has_finished = await control.drain(grace_s)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(calls.wait_until_idle(), _FLUSH_GRACE_S)
    await asyncio.sleep(_ACKNOWLEDGE_S)
    rest = "" if has_finished else f"; requests still running after {grace_s} s were ended"
    log.info("drained%s", rest)


def end_now(code: int) -> NoReturn:
    """End the process without waiting for threads or calls, and only a short time for the last lines of the log."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_LAST_BYTES_S)  # a pipe without a reader would block forever
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
