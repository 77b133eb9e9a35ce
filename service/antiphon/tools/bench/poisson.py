"""Section `poisson`: latency of requests of mixed lengths that arrive as a Poisson process.

Antiphon runs its engine and streams. CTranslate2 runs behind a batcher, which is the usual way to serve it; the
batcher's window, largest batch and workers are the best ones of a search. Latencies count from the scheduled arrival.
CTranslate2 returns the answers of a batch when the whole batch has ended, so its first token arrives with the last.

Targets of sentences end at their end token. Targets of random models never end, and CTranslate2 has one limit for a
whole batch: with random models every target has 16 tokens, as a short sentence has, and sources have 5 to 60.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from operator import attrgetter
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import uvloop

from antiphon.load.drive import highest_rate
from antiphon.load.results import percentile
from antiphon.load.workload import poisson_arrivals
from antiphon.tools.bench.corpus import Ids
from antiphon.tools.bench.ctranslate2 import CTranslate2Reference, CTranslate2Settings, Prompt, layouts, prompts_of
from antiphon.tools.bench.report import Case, Finding, alternate
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.offline import Offline

ROWS = 64
LIMIT_S = 0.25
_PERCENTS = (50, 95, 99)
_WINDOWS_S = (0.005, 0.010)
_MAX_BATCHES = (8, 16, 32, 64)
_RANDOM_TARGET_LEN = 16
_SHORTEST, _LONGEST = 5, 60
# Precision of the search for the highest rate is 4 %: 60^(1 / 2^7) = 1.03.
_STEPS = 7
_LOWEST, _HIGHEST = 0.02, 1.2  # share of the rate with all requests queued at the start
_MAX_SEARCHES = 3
# A run is abandoned this long after its last arrival. The time is far beyond the limit, so the run has failed by then.
_PATIENCE_S = 4.0
_SEED = 4

# One open-loop run at some arrival times.
Run = Callable[[Sequence[float]], "Waits"]
# Answers the request with an index and returns the time of its first token, by time.perf_counter.
Ask = Callable[[int], Awaitable[float]]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Requests of a run: sources, repeated in a cycle, and the maximum length of every target."""

    sources: list[Ids]
    max_new_tokens: int


def poisson(setup: Setup) -> list[Finding]:
    """Measure every model that CTranslate2 can run."""
    return [finding for subject in setup.with_ctranslate2() for finding in _poisson_subject(subject, setup)]


def _poisson_subject(subject: Subject, setup: Setup) -> list[Finding]:
    work, reference = _work(subject, setup.num_sentences), CTranslate2Reference(subject.ctranslate2_folder)
    with Offline(*setup.runners(subject, ROWS), rows=ROWS) as offline:
        translate = partial(
            offline.translate, work.sources, concurrency=len(work.sources), max_new_tokens=work.max_new_tokens
        )
        our_capacity = len(work.sources) / min(_seconds(translate) for _ in range(3))
        their_capacity, (settings, batcher) = _best_batcher(reference, work, setup)
        ours, theirs = partial(_run_ours, offline, work), partial(_run_theirs, reference, work, settings, batcher)
        searches = alternate(
            lambda: _search(ours, our_capacity, setup.seconds),
            lambda: _search(theirs, their_capacity, setup.seconds),
            min(setup.repeat, _MAX_SEARCHES),
        )
        rate = statistics.median(their_rate for _, their_rate in searches) or their_capacity * _LOWEST
        arrivals = poisson_arrivals(rate, setup.seconds, _SEED)
        waits = alternate(lambda: ours(arrivals), lambda: theirs(arrivals), min(setup.repeat, _MAX_SEARCHES))
    against = f"{settings}, window {batcher.window_s * 1e3:.0f} ms"
    return _findings(subject.name, against, rate, searches, waits)


def _findings(
    name: str, against: str, rate: float, searches: Sequence[tuple[float, float]], waits: Sequence[tuple[Waits, Waits]]
) -> list[Finding]:
    case = partial(Case, name="poisson", rows=ROWS, against=against, is_ctranslate2=True)
    findings = [case(case=f"{name}, highest rate with p99 <= 250 ms").finding(searches, "requests/s")]
    for what, seconds_of in (("latency", attrgetter("last_s")), ("TTFT", attrgetter("first_s"))):
        for percent in _PERCENTS:
            figures = [
                (1e3 * percentile(seconds_of(ours), percent), 1e3 * percentile(seconds_of(theirs), percent))
                for ours, theirs in waits
            ]
            findings.append(case(case=f"{name}, p{percent} {what} at {rate:,.1f} requests/s").finding(figures, "ms"))
    return findings


def _work(subject: Subject, count: int) -> Work:
    if not subject.is_endless:
        return Work(sources=subject.sources(count), max_new_tokens=subject.max_new_tokens)
    rng = random.Random(_SEED)
    lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(count // 4)]
    return Work(sources=subject.random_sources(lengths), max_new_tokens=_RANDOM_TARGET_LEN)


def _search(run: Run, capacity: float, seconds: float) -> float:
    def holds(rate: float) -> bool:
        waits = run(poisson_arrivals(rate, seconds, _SEED))
        return percentile(waits.last_s, 99) <= LIMIT_S

    return highest_rate(holds, _LOWEST * capacity, _HIGHEST * capacity, _STEPS)


def _run_ours(offline: Offline, work: Work, arrivals: Sequence[float]) -> Waits:
    names = map(str, count())

    async def ask(index: int) -> float:
        source = work.sources[index % len(work.sources)]
        return await offline.first_token_s(next(names), source, work.max_new_tokens)

    return offline.run(offer(ask, arrivals, patience_s=_PATIENCE_S))


def _run_theirs(
    reference: CTranslate2Reference,
    work: Work,
    settings: CTranslate2Settings,
    config: BatcherConfig,
    arrivals: Sequence[float],
) -> Waits:
    translator = reference.translator(settings.workers, settings.threads)
    prompts = prompts_of(work.sources)

    def translate(batch: Sequence[Prompt]) -> Sequence[Any]:
        results: Sequence[Any] = translator.translate_batch(
            batch, beam_size=1, max_decoding_length=work.max_new_tokens, max_input_length=0
        )
        return results

    async def run() -> Waits:
        async with Batcher(translate, config) as batcher:

            async def ask(index: int) -> float:
                await batcher.ask(prompts[index % len(prompts)])
                return time.perf_counter()

            return await offer(ask, arrivals, patience_s=_PATIENCE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _best_batcher(
    reference: CTranslate2Reference, work: Work, setup: Setup
) -> tuple[float, tuple[CTranslate2Settings, BatcherConfig]]:
    """Return CTranslate2's capacity and its best settings.

    The capacity is requests per second with all requests queued at the start. The settings are those of CTranslate2 and
    its batcher with the least 95th percentile of latency at 0.6 of the capacity.
    """
    prompts = prompts_of(work.sources)
    candidates = [
        CTranslate2Settings(workers=workers, threads=threads, max_batch_size=size)
        for (workers, threads), size in product(layouts(setup.threads), _MAX_BATCHES)
    ]
    seconds = []
    for settings in candidates:
        reference.translate(prompts[:2], settings, max_new_tokens=2)
        seconds.append(reference.translate(prompts, settings, work.max_new_tokens)[0].seconds)
    capacity = len(prompts) / min(seconds)
    arrivals = poisson_arrivals(0.6 * capacity, setup.seconds / 4, _SEED)
    waits = {}
    for settings, window_s in product(candidates, _WINDOWS_S):
        config = BatcherConfig(workers=settings.workers, max_batch=settings.max_batch_size, window_s=window_s)
        waits[settings, config] = percentile(_run_theirs(reference, work, settings, config, arrivals).last_s, 95)
        print(
            f"antiphon bench:   {settings}, window {window_s * 1e3:.0f} ms: p95 {waits[settings, config] * 1e3:.0f} ms",
            file=sys.stderr,
        )
    return capacity, min(waits, key=waits.__getitem__)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Seconds from the scheduled arrival of each request to its first token and to its end.

    For an abandoned request, both values are the time until it was abandoned.
    """

    first_s: tuple[float, ...]
    last_s: tuple[float, ...]


async def offer(ask: Ask, arrivals: Sequence[float], *, patience_s: float) -> Waits:
    """Call ask at each arrival time. Abandon every request without an answer patience_s after the last arrival.

    Waits count from the scheduled time, so that a delay of the event loop is included.
    """
    start_s = time.perf_counter()

    async def waits_of(index: int, arrival_s: float) -> tuple[float, float]:
        await asyncio.sleep(start_s + arrival_s - time.perf_counter())
        first_s = await ask(index)
        return first_s - start_s - arrival_s, time.perf_counter() - start_s - arrival_s

    tasks = [asyncio.create_task(waits_of(index, arrival_s)) for index, arrival_s in enumerate(arrivals)]
    _, late = await asyncio.wait(tasks, timeout=arrivals[-1] + patience_s)
    given_up_s = time.perf_counter() - start_s
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    waits = [
        (given_up_s - arrival_s,) * 2 if task in late else task.result()
        for task, arrival_s in zip(tasks, arrivals, strict=True)
    ]
    return Waits(first_s=tuple(first for first, _ in waits), last_s=tuple(last for _, last in waits))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherConfig:
    """workers: maximum number of concurrent batches. window_s: time that the oldest request waits for others."""

    workers: int
    max_batch: int
    window_s: float


class Batcher(Generic[Item, Answer]):
    """Answers requests in batches. Use it as a context manager within one event loop.

    A batch starts when a worker is free and either max_batch requests wait or the oldest has waited for window_s.
    run: answers one batch, in order. It may block, since it runs in its own thread.
    """

    def __init__(self, run: Callable[[Sequence[Item]], Sequence[Answer]], config: BatcherConfig) -> None:
        self._run = run
        self._config = config
        self._waiting: deque[tuple[float, Item, asyncio.Future[Answer]]] = deque()
        self._has_news = asyncio.Event()
        self._free = asyncio.Semaphore(config.workers)
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="batch")
        self._batches: set[asyncio.Task[None]] = set()

    async def ask(self, item: Item) -> Answer:
        """Return the answer to one request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((loop.time(), item, future))
        self._has_news.set()
        return await future

    async def _collect(self) -> None:
        while True:
            await self._free.acquire()
            await self._fill()
            members = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._config.max_batch))]
            self._batches.add(task := asyncio.create_task(self._answer([member[1:] for member in members])))
            task.add_done_callback(self._batches.discard)

    async def _fill(self) -> None:
        """Wait until a batch can start."""
        loop = asyncio.get_running_loop()
        while len(self._waiting) < self._config.max_batch:
            remaining_s = self._waiting[0][0] + self._config.window_s - loop.time() if self._waiting else None
            if remaining_s is not None and remaining_s <= 0:
                return
            self._has_news.clear()
            try:
                await asyncio.wait_for(self._has_news.wait(), remaining_s)
            except TimeoutError:
                return

    async def _answer(self, members: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        pending = [(item, future) for item, future in members if not future.done()]
        try:
            if pending:
                items = [item for item, _ in pending]
                answers = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, items)
                for (_, future), answer in zip(pending, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        except Exception as fault:
            for _, future in pending:
                if not future.done():
                    future.set_exception(fault)
        finally:
            self._free.release()

    async def __aenter__(self) -> Self:
        self._collector = asyncio.create_task(self._collect())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._collector.cancel()
        await asyncio.gather(self._collector, *self._batches, return_exceptions=True)
        self._threads.shutdown()
