"""Clocks, and runs that take turns so that a busy machine is busy for both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from antiphon.service.tools.bench.report import Speed

# Threads of OpenMP look for work for a while after theirs is done; that is not to happen in the other side's time.
SETTLE_S = 0.25

A = TypeVar("A")
B = TypeVar("B")


def timed(translate: Callable[[], Sequence[Sequence[int]]]) -> Speed:
    """Run once; the tokens that came out, over the wall's seconds and this process's CPU's."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    targets = translate()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return Speed(num_tokens=sum(map(len, targets)), seconds=seconds, cpu_s=cpu_s)


def alternate(ours: Callable[[], A], theirs: Callable[[], B], count: int) -> list[tuple[A, B]]:
    """Run both sides `count` times, one after the other; who goes first changes every time."""
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
