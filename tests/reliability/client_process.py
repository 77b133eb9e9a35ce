"""Client in a separate process, which a test can kill or run in another network namespace.

    python -m tests.reliability.client_process endless TARGET COUNT
    python -m tests.reliability.client_process compare TARGET COUNT

endless: reads streams without an end; prints `first` when every stream has begun. compare: sends every kind of request
alone, prints `ready`, waits for a line, makes COUNT calls, some of which it cancels, and prints their outcomes as JSON.
"""

import asyncio
import json
import random
import sys

from antiphon.client import AsyncClient
from tests.reliability.asking import LONG, references, streamed
from tests.reliability.storm import Storm


async def endless(target: str, count: int) -> None:
    """Open a number of long streams and read them repeatedly."""

    async def follow(client: AsyncClient, number: int, first: asyncio.Event) -> None:
        while True:
            await streamed(client, number, first=first)

    async with AsyncClient(target) as client:
        firsts = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.ensure_future(follow(client, LONG + index, first)) for index, first in enumerate(firsts)]
        await asyncio.gather(*(first.wait() for first in firsts))
        print("first", flush=True)
        await asyncio.gather(*tasks)


async def compare(target: str, count: int) -> None:
    """Compare answers during a fault with answers before it."""
    async with AsyncClient(target) as client:
        expected = await references(client)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        storm = Storm(client=client, expected=expected, rng=random.Random(count))
        await storm.rage(count, at_once=16)
    print(json.dumps(storm.outcomes), flush=True)


if __name__ == "__main__":
    asyncio.run({"endless": endless, "compare": compare}[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
