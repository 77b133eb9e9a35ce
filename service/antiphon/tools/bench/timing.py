"""Timing of one run, and alternation of two sides, so that a busy machine slows both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from antiphon.tools.bench.report import Speed

# OpenMP threads spin for some time after their work has ended. This must not take time from the other side.
SETTLE_S = 0.25

A = TypeVar("A")
B = TypeVar("B")


def timed(translate: Callable[[], Sequence[Sequence[int]]]) -> Speed:
    """Run once; return the number of target tokens, the wall-clock seconds and the CPU seconds of this process."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    targets = translate()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return Speed(num_tokens=sum(map(len, targets)), seconds=seconds, cpu_s=cpu_s)


def alternate(ours: Callable[[], A], theirs: Callable[[], B], count: int) -> list[tuple[A, B]]:
    """Run both sides `count` times in turn. The side that runs first changes every time."""
    pairs = []
    for index in range(count):
        if index % 2:
            theirs_first = _settled(theirs)
            pairs.append((_settled(ours), theirs_first))
        else:
            pairs.append((_settled(ours), _settled(theirs)))
    return pairs


def _settled(run: Callable[[], A]) -> A:
    time.sleep(SETTLE_S)
    return run()
