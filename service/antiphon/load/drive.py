"""Runs a plan: `run` uses separate client processes, `drive` the current event loop. Searches for the highest rate.

    result = run(Plan(asks=(Ask(source="How are you?"),), rate=50, duration_s=10))
    print(result.num_ok, result.e2e_ms.p99)

A client in the same process as other work, such as the server, also measures that work. `drive` is therefore for tests.

A client process is this module as a program, `python -m antiphon.load.drive`, which only `run` starts.
Standard input: a pickled (plan, number of the process), then a line with the start time. The run stops when it closes.
Standard output, pickled: None or the reason why the process cannot start, then the record. The parent, a process of the
same program, holds the other ends of both pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, BinaryIO

from antiphon.load.calls import Caller
from antiphon.load.open_loop import offer
from antiphon.load.plan import Plan
from antiphon.load.results import Record, Result
from antiphon.load.workload import share_of

# Time between the order to start and the start, so that every process has received the order.
_LEAD_S = 0.1
# Maximum number of doublings or halvings from the start rate.
_MAX_DOUBLINGS = 14


class DriveError(Exception):
    """A load test could not run: there was no connection, or a client process failed."""


def run(plan: Plan) -> Result:
    """Run a plan to its end and return the result. Blocks. An interrupt stops the run and keeps its results so far.

    Raises DriveError. Raises KeyboardInterrupt for an interrupt before the run has begun, or for a second one.
    """
    with ThreadPoolExecutor(max_workers=plan.processes) as pool:
        processes: list[_ClientProcess] = []
        try:
            processes.extend(_ClientProcess(plan, number) for number in range(plan.processes))
            return Result(plan=plan, record=_run_processes(processes, pool))
        finally:
            for process in processes:
                process.end()


async def drive(plan: Plan, stop: asyncio.Event | None = None) -> Result:
    """Run a plan of one process from this event loop. stop: when set, the run ends and keeps its results so far."""
    async with Caller(plan) as caller:
        await caller.connect()
        arrivals, start_s = share_of(plan, 0), time.monotonic()
        record = await offer(caller, plan, arrivals, start_s=start_s, stop=stop or asyncio.Event())
    return Result(plan=plan, record=record)


def highest_rate(holds: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """Return the highest rate found that holds, by bisection between `low` and `high` on a logarithmic scale.

    Returns 0 if none of the tried rates holds. `high` itself is not tried.
    """
    best = 0.0
    for _ in range(steps):
        rate = math.sqrt(low * high)
        if holds(rate):
            best = low = rate
        else:
            high = rate
    return best


def bracketed_rate(holds: Callable[[float], bool], start: float, precision: float) -> float:
    """Return the highest rate found that holds: doubles or halves `start` to find a bracket, then bisects it.

    precision: maximum relative distance between the returned rate and a rate that failed. Returns 0 if even the lowest
    tried rate fails, and the highest tried rate if every rate holds.
    """
    passed, failed = (start, None) if holds(start) else (None, start)
    for _ in range(_MAX_DOUBLINGS):
        if passed is not None and failed is not None:
            break
        if failed is None:
            assert passed is not None
            passed, failed = (2 * passed, None) if holds(2 * passed) else (passed, 2 * passed)
        else:
            passed, failed = (failed / 2, failed) if holds(failed / 2) else (None, failed / 2)
    if passed is None or failed is None:
        return passed or 0.0
    steps = math.ceil(math.log2(math.log(failed / passed) / math.log1p(precision)))
    return highest_rate(holds, passed, failed, steps) or passed


def _run_processes(processes: Sequence[_ClientProcess], pool: ThreadPoolExecutor) -> Record:
    for problem in pool.map(_ClientProcess.read, processes):
        if problem is not None:
            raise DriveError(problem)
    start_s = time.monotonic() + _LEAD_S
    for process in processes:
        process.start(start_s)
    records = [pool.submit(process.read) for process in processes]
    try:
        wait(records)
    except KeyboardInterrupt:
        for process in processes:
            process.stop()
    total = Record()
    for record in records:
        total.merge(record.result())
    return total


class _ClientProcess:
    """A client process, from its parent's side."""

    def __init__(self, plan: Plan, number: int) -> None:
        # In its own process group, so that a terminal's interrupt does not reach it. It only gets orders from here.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "antiphon.load.drive"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        self._send(pickle.dumps((plan, number)))

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


def main() -> None:
    """Run one process's share of a plan."""
    plan, number = pickle.load(sys.stdin.buffer)
    _run_loop(_work(plan, number, sys.stdin.buffer, sys.stdout.buffer))


def _run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run with uvloop if it is installed, which needs less time per request and sends closer to the schedule."""
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


async def _work(plan: Plan, number: int, orders: BinaryIO, reports: BinaryIO) -> None:
    arrivals = share_of(plan, number)
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
