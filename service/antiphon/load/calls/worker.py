"""One client process of a load test: `python -m antiphon.load.calls.worker`, which only `drive.py` starts.

Standard input: a pickled (plan, process), then a line with the start time. The run stops when standard input closes.
Standard output, pickled: None or the reason why the process cannot start, then the record. The parent, a process of the
same program, holds the other ends of both pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pickle
import sys
import threading
from collections.abc import Coroutine
from typing import Any, BinaryIO

from antiphon.load.calls.caller import Caller
from antiphon.load.calls.offer import offer
from antiphon.load.calls.record import Record
from antiphon.load.plan import Plan
from antiphon.load.workload.schedule import share_of


def main() -> None:
    """Run one process's share of a plan."""
    plan, process = pickle.load(sys.stdin.buffer)
    _run(_work(plan, process, sys.stdin.buffer, sys.stdout.buffer))


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run with uvloop if it is installed, which needs less time per request and sends closer to the schedule."""
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


async def _work(plan: Plan, process: int, orders: BinaryIO, reports: BinaryIO) -> None:
    arrivals = share_of(plan, process)
    async with Caller(plan) as caller:
        try:
            await caller.connect()
        except TimeoutError:
            _report(reports, f"no connection to {plan.target} within {plan.timeout_s:g} s")
            return
        _report(reports, None)
        start = await asyncio.to_thread(orders.readline)
        if not start:
            return
        stop = asyncio.Event()
        _watch(orders, stop)
        _report(reports, await offer(caller, plan, arrivals, start_s=float(start), stop=stop))


def _watch(orders: BinaryIO, stop: asyncio.Event) -> None:
    """Set `stop` when the parent closes standard input or ends."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        # Does not read through `orders`: a thread that holds its lock is a fatal error when the interpreter exits.
        os.read(orders.fileno(), 1)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="orders", daemon=True).start()


def _report(reports: BinaryIO, report: str | Record | None) -> None:
    pickle.dump(report, reports)
    reports.flush()


if __name__ == "__main__":
    main()
