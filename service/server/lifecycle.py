"""From the first signal to the last byte: when a server leaves, and in which order.

Owns signals, exit codes and the drain; docs/LIFECYCLE.md tells what a client sees meanwhile. What is served and how is
`server.py`'s business, what the probes say `probes.py`'s.
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

from antiphon.service.rpc.calls.background import let_go
from antiphon.service.rpc.calls.probes import Probes
from antiphon.service.rpc.v1.handlers import Calls
from antiphon.service.server.control import Control

log = logging.getLogger(__name__)

EXIT_ENGINE_FAULT = 1
EXIT_USER_ERROR = 2

# For answers that are complete but not read yet: a client that reads nothing must not keep the process alive.
_FLUSH_GRACE_S = 5.0
# A process that ends with bytes of its clients unread takes back what they have not acknowledged (TCP resets).
_ACKNOWLEDGE_S = 0.1
_ENGINE_CHECK_S = 1.0
_LAST_BYTES_S = 3.0

_A = TypeVar("_A")


class Stop:
    """Whether somebody asked the process to leave. A second signal ends it there and then."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def on_signals(self) -> None:
        """Be asked by SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Return when asked."""
        await self._asked.wait()

    async def unless_asked(self, work: Awaitable[_A]) -> _A | None:
        """What the work comes to, or, as soon as the process is to leave, None; the work may go on then."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if task.done():
            return task.result()
        let_go(task)
        return None

    def _on_signal(self, number: signal.Signals) -> None:
        if self._asked.is_set():
            end_now(128 + number)
        log.info("%s: leaving; once more to leave at once", number.name)
        self._asked.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """How long leaving may take.

    delay_s: new requests are still served, until whoever balances the load has seen the probes.
    drain_s: then none are, and those that run or wait finish.
    """

    delay_s: float
    drain_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A server that answers, and who tells whether it does."""

    control: Control
    calls: Calls
    probes: Probes

    async def until_stopped(self, stop: Stop, grace: Grace) -> int:
        """Serve until told to stop or an engine is lost, then leave; the exit code. The port stays open meanwhile."""
        is_asked = await self._until_asked_or_lost(stop)
        await self.probes.leave()
        if is_asked and grace.delay_s:
            log.info("new requests are served for another %s s", grace.delay_s)
            await asyncio.sleep(grace.delay_s)
        await self._drain(grace.drain_s)
        return EXIT_ENGINE_FAULT if not is_asked or self.control.has_hung_engine else 0

    async def _until_asked_or_lost(self, stop: Stop) -> bool:
        while not self.control.has_lost_engine:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _ENGINE_CHECK_S)
                return True
        log.critical("an engine is gone; leaving, so that whoever watches this process starts another")
        return False

    async def _drain(self, grace_s: float) -> None:
        """Finish what runs, refuse what comes; the port stays open so that the refusal can be heard."""
        has_finished = await self.control.drain(grace_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.calls.wait_until_idle(), _FLUSH_GRACE_S)
        await asyncio.sleep(_ACKNOWLEDGE_S)
        rest = "" if has_finished else f"; requests still running after {grace_s} s were ended"
        log.info("drained%s", rest)


def end_now(code: int) -> NoReturn:
    """Leave without waiting for anything but the log's last lines, and not long for them: no thread, no call."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_LAST_BYTES_S)  # a pipe that nobody reads would never take them
    os._exit(code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
