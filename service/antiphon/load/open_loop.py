"""Open loop of one process: sends every request at its scheduled time and does not wait for earlier answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Protocol

from antiphon.load.plan import Ask, Plan
from antiphon.load.results import OK, Record, Reply
from antiphon.load.workload import Arrival

# Wait for a call beyond its deadline. gRPC normally ends it by then.
_GRACE_S = 5.0


class Calls(Protocol):
    """Makes one call of a plan and waits for its end. A cancelled call also returns a result."""

    async def call(self, ask: int, scheduled_s: float, start_s: float) -> Reply:
        """Make one call, as `Caller.call` does."""


async def offer(
    caller: Calls, plan: Plan, arrivals: Iterable[Arrival], *, start_s: float, stop: asyncio.Event
) -> Record:
    """Make every call at its time, wait for the last answers, and return the record of all calls.

    start_s: time.monotonic() at the start of the run. stop: when set, nothing more is sent, and no answer is awaited.
    """
    loop = _Loop(caller, plan, start_s)
    stopping = asyncio.create_task(stop.wait())
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(loop.send(arrivals, group))
        try:
            await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
            await loop.drain(stopping)
        finally:
            for task in (stopping, sending, *loop.calls):
                task.cancel()
    if stop.is_set():
        loop.record.stopped_s = time.monotonic() - start_s
    return loop.record


class _Loop:
    def __init__(self, caller: Calls, plan: Plan, start_s: float) -> None:
        self.record = Record()
        self.calls: set[asyncio.Task[None]] = set()
        self._caller = caller
        self._plan = plan
        self._start_s = start_s
        firsts: dict[Ask, int] = {}
        self._alike = [firsts.setdefault(ask, index) for index, ask in enumerate(plan.asks)]
        self._give_up_s = start_s + plan.end_s + plan.timeout_s
        self._max_outstanding = plan.max_outstanding // plan.processes

    async def send(self, arrivals: Iterable[Arrival], group: asyncio.TaskGroup) -> None:
        rest = iter(arrivals)
        for scheduled_s, ask in rest:
            await _sleep_until(self._start_s + scheduled_s)
            if time.monotonic() > self._give_up_s:
                self.record.dropped_s.extend(time_s for time_s, _ in itertools.chain([(scheduled_s, ask)], rest))
                return
            if len(self.calls) >= self._max_outstanding:
                self.record.dropped_s.append(scheduled_s)
                continue
            call = group.create_task(self._call(ask, scheduled_s))
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)

    async def drain(self, stopping: asyncio.Task[bool]) -> None:
        """Wait until every call has ended or is past its deadline, or until the run is stopped."""
        ended = asyncio.gather(*self.calls)
        waited_s = self._plan.timeout_s + _GRACE_S
        await asyncio.wait((ended, stopping), timeout=waited_s, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()

    async def _call(self, ask: int, scheduled_s: float) -> None:
        reply = await self._caller.call(ask, scheduled_s, self._start_s)
        if self._plan.check and reply.text is not None and reply.outcome.status == OK:
            self.record.compare(self._alike[ask], reply.text)
        if scheduled_s < self._plan.warmup_s:
            self.record.num_warmup += 1
        else:
            self.record.add(reply)


async def _sleep_until(due_s: float) -> None:
    """Sleep until a time of time.monotonic(), and at least once, so that running calls can continue.

    One sleep may be too short: uvloop rounds to the nearest millisecond, and a request must not be early.
    """
    while True:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if time.monotonic() >= due_s:
            return
