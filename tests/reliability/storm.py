"""Calls that are cancelled at random moments, and whose answers are compared with references.

A call that was not cancelled must have the whole answer, and a cancelled one a prefix of it.
"""

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import grpc

from antiphon.client import AsyncClient, ServerError
from tests.reliability.asking import NUM_KINDS, Heard, Texts, streamed

# Moments of cancellation; every third call is cancelled.
MOMENTS = ("before it is sent", "in the queue", "at its first message", "in mid-stream", "by its deadline")


@dataclass(kw_only=True, slots=True)
class Storm:
    """Makes numbered calls. expected: answer to each kind of request. outcomes: number of calls by outcome."""

    client: AsyncClient
    expected: dict[int, Texts]
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)

    async def rage(self, num_calls: int, *, at_once: int) -> None:
        """Make a number of calls with bounded concurrency. Raises AssertionError on a wrong answer."""
        gate = asyncio.Semaphore(at_once)

        async def gated(number: int) -> None:
            async with gate:
                await self.call(number)

        await asyncio.gather(*map(gated, range(num_calls)))

    async def call(self, number: int) -> None:
        """Make one call to its end, or cancel it if it is a third one."""
        moment = MOMENTS[number // 3 % len(MOMENTS)] if number % 3 == 0 else "to its end"
        kind = self.rng.randrange(NUM_KINDS)
        heard, first = Heard(defaultdict(str)), asyncio.Event()
        timeout_s = self.rng.uniform(0.001, 0.5) if moment == "by its deadline" else None
        task = asyncio.ensure_future(streamed(self.client, kind, heard=heard, first=first, timeout_s=timeout_s))
        await _leave(moment, task, heard, first, self.rng)
        await asyncio.wait({task})
        self._judge(moment, kind, task, heard)

    def _judge(self, moment: str, kind: int, task: asyncio.Future[Texts], heard: Heard) -> None:
        expected = self.expected[kind]
        if task.cancelled():
            assert heard.is_beginning_of(expected), f"given up {moment}, {kind} began {heard.texts}, not {expected}"
            self.outcomes[f"{moment}: given up"] += 1
            return
        error = task.exception()
        if moment == "by its deadline" and isinstance(error, ServerError):
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED, str(error)
            assert heard.is_beginning_of(expected), f"{kind} began {heard.texts}, not {expected}"
            self.outcomes[f"{moment}: expired"] += 1
            return
        assert error is None, f"{moment}: {error}"
        assert task.result() == expected, f"{kind} was answered {task.result()}, not {expected}"
        self.outcomes[f"{moment}: answered"] += 1


async def _leave(
    moment: str, task: asyncio.Future[Texts], heard: Heard, first: asyncio.Event, rng: random.Random
) -> None:
    """Cancel the call at its moment, unless it has ended before."""
    if moment == "before it is sent":
        task.cancel()
    elif moment == "in the queue":
        await asyncio.wait({task}, timeout=rng.uniform(0, 0.02))
        task.cancel()
    elif moment == "at its first message":
        await _either(task, first)
        task.cancel()
    elif moment == "in mid-stream":
        await _either(task, first)
        await asyncio.wait({task}, timeout=rng.uniform(0, 0.1))
        task.cancel()


async def _either(task: asyncio.Future[Texts], first: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(first.wait())
    pair: set[asyncio.Future[Any]] = {task, waiting}
    await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
