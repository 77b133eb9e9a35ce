"""Client of the gRPC benchmark. It has its own process, so that its work does not slow the benchmark's process.

    python -m antiphon.service.tools.bench.processes.client TARGET STREAMS MAX_NEW_TOKENS < sources.json

Sources are texts or lists of ids. Prints {num_tokens, seconds, texts}: number of target tokens, end tokens included;
time from the first request to the last answer; and the answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence

import uvloop

from antiphon.client import AsyncClient, Options, Source


def main() -> None:
    """Read the sources, stream the answers to all of them and print the result."""
    target, streams, max_new_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sources = json.load(sys.stdin)
    json.dump(uvloop.run(_translate(target, sources, streams, Options(max_new_tokens=max_new_tokens))), sys.stdout)


async def _translate(target: str, sources: Sequence[Source], streams: int, options: Options) -> dict[str, object]:
    answers: dict[int, str] = {}
    num_tokens = 0

    async def work(waiting: Iterator[tuple[int, Source]]) -> None:
        nonlocal num_tokens
        for index, source in waiting:
            parts = []
            async for delta in client.generate(source, options):
                parts.append(delta.text)
                num_tokens += delta.usage.generated_tokens if delta.usage else 0
            answers[index] = "".join(parts)

    async with AsyncClient(target) as client:
        await client.get_model()  # connects
        started_s = time.perf_counter()
        shared = iter(enumerate(sources))
        await asyncio.gather(*(work(shared) for _ in range(streams)))
        seconds = time.perf_counter() - started_s
    return {"num_tokens": num_tokens, "seconds": seconds, "texts": [answers[index] for index in range(len(sources))]}


if __name__ == "__main__":
    main()
