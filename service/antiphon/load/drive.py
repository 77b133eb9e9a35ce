"""Runs a plan: `run` uses separate client processes, `drive` the current event loop.

    result = run(Plan(asks=(Ask(source="How are you?"),), rate=50, duration_s=10))
    print(result.num_ok, result.e2e_ms.p99)

A client in the same process as other work, such as the server, also measures that work. `drive` is therefore for tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from antiphon.load.calls.caller import Caller
from antiphon.load.calls.offer import offer
from antiphon.load.calls.record import Record
from antiphon.load.plan import Plan
from antiphon.load.results.result import Result
from antiphon.load.workload.schedule import share_of

# Time between the order to start and the start, so that every process has received the order.
_LEAD_S = 0.1


class DriveError(Exception):
    """A load test could not run: there was no connection, or a client process failed."""


def run(plan: Plan) -> Result:
    """Run a plan to its end and return the result. Blocks. An interrupt stops the run and keeps its results so far.

    Raises DriveError. Raises KeyboardInterrupt for an interrupt before the run has begun, or for a second one.
    """
    with ThreadPoolExecutor(max_workers=plan.processes) as pool:
        workers: list[_Worker] = []
        try:
            workers.extend(_Worker(plan, process) for process in range(plan.processes))
            return Result(plan=plan, record=_run(workers, pool))
        finally:
            for worker in workers:
                worker.end()


async def drive(plan: Plan, stop: asyncio.Event | None = None) -> Result:
    """Run a plan of one process from this event loop. stop: when set, the run ends and keeps its results so far."""
    async with Caller(plan) as caller:
        await caller.connect()
        arrivals, start_s = share_of(plan, 0), time.monotonic()
        record = await offer(caller, plan, arrivals, start_s=start_s, stop=stop or asyncio.Event())
    return Result(plan=plan, record=record)


def _run(workers: Sequence[_Worker], pool: ThreadPoolExecutor) -> Record:
    for problem in pool.map(_Worker.read, workers):
        if problem is not None:
            raise DriveError(problem)
    start_s = time.monotonic() + _LEAD_S
    for worker in workers:
        worker.start(start_s)
    records = [pool.submit(worker.read) for worker in workers]
    try:
        wait(records)
    except KeyboardInterrupt:
        for worker in workers:
            worker.stop()
    together = Record()
    for record in records:
        together.merge(record.result())
    return together


class _Worker:
    """A client process, as `worker.py` describes it."""

    def __init__(self, plan: Plan, process: int) -> None:
        # In its own process group, so that a terminal's interrupt does not reach it. It only gets orders from here.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "antiphon.load.calls.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        self._send(pickle.dumps((plan, process)))

    def read(self) -> Any:
        """Return the next report of the process. Raises DriveError if the process has ended."""
        try:
            return pickle.load(self._reports)
        except (EOFError, pickle.UnpicklingError):
            raise DriveError("a client process failed; its error message is above") from None

    def start(self, start_s: float) -> None:
        """Start the run at a time of time.monotonic()."""
        self._send(f"{start_s!r}\n".encode())

    def stop(self) -> None:
        """Stop the run now."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def end(self) -> None:
        """Kill the process."""
        self.stop()
        self._process.kill()
        self._process.wait()
        self._reports.close()

    def _send(self, order: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has failed; `read` reports it
            self._orders.write(order)
            self._orders.flush()
