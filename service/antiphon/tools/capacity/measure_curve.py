"""Measures the curve of one server for `antiphon simulate`: answers per second by number of concurrent requests.

    python -m antiphon.tools.capacity.measure_curve --target 127.0.0.1:50051 --seconds 10 --output curve.json

The load is a closed loop: each caller sends its next request after the answer to the last one, with the texts of
`antiphon load`. Run it on other cores than the server; otherwise the curve includes the work of both.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.client import AsyncClient, Options
from antiphon.load.workload.texts import read_texts

ROWS = (1, 2, 4, 8, 16, 32, 64)
_NUM_QUANTILES = 40
_WARM_UP_SHARE = 0.2


def main() -> None:
    """Measure every number of callers and write the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="duration for each number of callers (default: %(default)s)",
    )
    parser.add_argument("--input", metavar="FILE", help="texts, one per line (default: those of antiphon load)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    texts = list(read_texts(arguments.input))
    random.Random(1).shuffle(texts)
    per_s, tokens = asyncio.run(_measure(arguments, texts))
    curve = {
        "origin": f"{platform.machine()}, {os.cpu_count()} cores, closed loop, {arguments.seconds:g} s a point",
        "rows": ROWS,
        "answers_per_s": [round(rate, 2) for rate in per_s],
        "work": _quantiles(tokens),
        "mean_tokens": round(sum(tokens) / len(tokens), 2),
    }
    arguments.output.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")


async def _measure(arguments: argparse.Namespace, texts: Sequence[str]) -> tuple[list[float], list[int]]:
    per_s: list[float] = []
    tokens: list[int] = []
    options = Options() if arguments.max_new_tokens is None else Options(max_new_tokens=arguments.max_new_tokens)
    async with AsyncClient(arguments.target) as client:
        for rows in ROWS:
            counted, elapsed_s = await _closed_loop(client, itertools.cycle(texts), rows, arguments.seconds, options)
            per_s.append(len(counted) / elapsed_s)
            tokens += counted
            print(f"{rows} at once: {per_s[-1]:,.1f} answers/s", file=sys.stderr)
    return per_s, tokens


async def _closed_loop(
    client: AsyncClient, texts: Iterator[str], rows: int, seconds: float, options: Options
) -> tuple[list[int], float]:
    """Return the number of tokens of each answer in a window after a warm-up, and the seconds of the window.

    The window lasts until there are at least three answers per caller.
    """
    begin_s = time.monotonic() + _WARM_UP_SHARE * seconds
    counted: list[int] = []

    def is_over() -> bool:
        return time.monotonic() >= begin_s + seconds and len(counted) >= 3 * rows

    async def call() -> None:
        while not is_over():
            num_tokens = 0
            async for delta in client.generate(next(texts), options):
                num_tokens += len(delta.token_ids)
            if time.monotonic() >= begin_s and not is_over():
                counted.append(num_tokens)

    calls = [asyncio.ensure_future(call()) for _ in range(rows)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    elapsed_s = time.monotonic() - begin_s
    await asyncio.gather(*calls)
    return counted, elapsed_s


def _quantiles(tokens: Sequence[int]) -> list[float]:
    """Return evenly spaced quantiles of the lengths over their mean: the work of an answer relative to the mean."""
    ordered, mean = sorted(tokens), sum(tokens) / len(tokens)
    places = [(index + 0.5) / _NUM_QUANTILES for index in range(_NUM_QUANTILES)]
    return [round(ordered[int(place * len(ordered))] / mean, 4) for place in places]


if __name__ == "__main__":
    main()
