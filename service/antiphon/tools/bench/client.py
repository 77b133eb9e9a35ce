"""Client of the gRPC benchmark. It has its own process, so that its work does not slow the benchmark's process.

    python -m antiphon.tools.bench.client TARGET KIND CONCURRENCY MAX_NEW_TOKENS < sources.json

Sources are texts or lists of ids. KIND: streams or unary (a call for each source), or many (one call). Prints
{num_tokens, seconds, cpu_s, texts, first_s, total_s}: number of target tokens, end tokens included; time from the first
request to the last answer, and CPU time of this process meanwhile; the answers; and, of each stream, the time to its
first token and to its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import uvloop

from antiphon.client import AsyncClient, Generation, Options, ServerError, Source


class Answer(NamedTuple):
    """Text of an answer, its number of tokens, the end token included, and seconds of a stream."""

    text: str
    num_tokens: int
    first_s: float = 0.0
    total_s: float = 0.0


Way = Callable[[AsyncClient, Sequence[Source], int, Options], Awaitable[list[Answer]]]
"""Asks for all sources, a number of them at a time."""


def main() -> None:
    """Read the sources, ask for all of them and print the result."""
    target, kind, concurrency, max_new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sources = json.load(sys.stdin)
    options = Options(max_new_tokens=max_new_tokens)
    json.dump(uvloop.run(_measure(target, sources, _WAYS[kind], concurrency, options)), sys.stdout)


async def _measure(
    target: str, sources: Sequence[Source], way: Way, concurrency: int, options: Options
) -> dict[str, object]:
    async with AsyncClient(target) as client:
        await client.connect()
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        answers = await way(client, sources, concurrency, options)
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    texts, num_tokens, first_s, total_s = (list(column) for column in zip(*answers, strict=True))
    return {
        "num_tokens": sum(num_tokens),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "texts": texts,
        "first_s": first_s,
        "total_s": total_s,
    }


async def _streams(client: AsyncClient, sources: Sequence[Source], concurrency: int, options: Options) -> list[Answer]:
    async def answer(source: Source) -> Answer:
        parts, num_tokens, first_s = [], 0, 0.0
        started_s = time.perf_counter()
        async for delta in client.generate(source, options):
            first_s = first_s or time.perf_counter() - started_s
            parts.append(delta.text)
            num_tokens += delta.usage.generated_tokens if delta.usage else 0
        return Answer("".join(parts), num_tokens, first_s, time.perf_counter() - started_s)

    return await _in_turn(answer, sources, concurrency)


async def _unary(client: AsyncClient, sources: Sequence[Source], concurrency: int, options: Options) -> list[Answer]:
    async def answer(source: Source) -> Answer:
        return _answer(await client.generate_text(source, options))

    return await _in_turn(answer, sources, concurrency)


async def _in_turn(
    answer: Callable[[Source], Awaitable[Answer]], sources: Sequence[Source], concurrency: int
) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def work(waiting: Iterator[tuple[int, Source]]) -> None:
        for index, source in waiting:
            answers[index] = await answer(source)

    shared = iter(enumerate(sources))
    await asyncio.gather(*(work(shared) for _ in range(concurrency)))
    return [answers[index] for index in range(len(sources))]


async def _many(client: AsyncClient, sources: Sequence[Source], concurrency: int, options: Options) -> list[Answer]:
    answers = []
    async for result in client.generate_many(sources, options, concurrency=concurrency):
        if isinstance(result, ServerError):
            raise result
        answers.append(_answer(result))
    return answers


def _answer(generation: Generation) -> Answer:
    return Answer(generation.text, generation.usage.generated_tokens)


_WAYS: dict[str, Way] = {"streams": _streams, "unary": _unary, "many": _many}


if __name__ == "__main__":
    main()
